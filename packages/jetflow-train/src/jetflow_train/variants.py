"""The ablations as data: which heads are compared, and what each differs in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REGENERATED, MATCHED, CORPUS = "regenerated", "matched", "corpus"


@dataclass(frozen=True)
class Variant:
    """A head that differs from the one named `against` in one thing.

    `changes` are options of the shared base. `data` is what it learns from: all REGENERATED rows, CORPUS answers, or the MATCHED
    regenerated rows, one for each of the corpus's prompts. `below`: by the paper it stays behind `against`.
    """

    name: str
    varies: str
    against: str = "base"
    changes: dict[str, Any] = field(default_factory=dict[str, Any])
    data: str = REGENERATED
    below: bool = False


VARIANTS = (
    Variant("base", ""),
    Variant("reverse-kl", "loss", changes={"loss": "reverse_kl"}, below=True),
    Variant("cross-entropy", "loss", changes={"loss": "cross_entropy"}),
    Variant("total-variation", "loss", changes={"loss": "total_variation"}),
    Variant("bidirectional", "attention", changes={"attention": "bidirectional"}, below=True),
    # The paper's own pair: both heads without branch conditioning.
    Variant("unconditioned", "conditioning", changes={"pairwise_size": 0}),
    Variant(
        "unconditioned-bidirectional",
        "attention, unconditioned",
        against="unconditioned",
        changes={"pairwise_size": 0, "attention": "bidirectional"},
        below=True,
    ),
    Variant("second-order", "conditioning order", changes={"pairwise_order": 2}),
    Variant("pairwise-128", "conditioning width", changes={"pairwise_size": 128}),
    Variant("pairwise-512", "conditioning width", changes={"pairwise_size": 512}),
    Variant("prefix", "known tokens before the masks", changes={"prefix": 0.5}),
    Variant("eagle", "kind", changes={"kind": "eagle"}),
    Variant("matched", "data", data=MATCHED),
    Variant("corpus", "data", against="matched", data=CORPUS, below=True),
    Variant("gamma-none", "gamma", changes={"gamma": None}),
    Variant("gamma-2", "gamma", changes={"gamma": 2.0}),
    Variant("gamma-8", "gamma", changes={"gamma": 8.0}),
    Variant("block-6", "block size", changes={"block_size": 6}),
    Variant("block-14", "block size", changes={"block_size": 14}),
    Variant("layers-1", "layers", changes={"layers": 1}),
    Variant("layers-2", "layers", changes={"layers": 2}),
    Variant("layers-5", "layers", changes={"layers": 5}),
    Variant("taps-1", "taps", changes={"taps": 1}),
    Variant("taps-3", "taps", changes={"taps": 3}),
)
