"""A tiny random target on disk, with a tokenizer of words and a chat template that thinks on demand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import tokenizers

GOLDEN = Path(__file__).parents[1] / "core" / "golden" / "qwen3"
WORDS = 97  # w0 … w96; w2 ends an answer
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}w1 {{ m.content }} {% else %}w3 {{ m.content }} w2 {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w3{% if enable_thinking is defined and not enable_thinking %} w4{% endif %}{% endif %}"
)


def write_checkpoint(folder: Path) -> str:
    """Write the target into `folder`, in the Hugging Face layout."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder / name)
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    inner.add_special_tokens(["w2"])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "w2"}))
    return str(folder)


def write_prompts(path: Path, count: int) -> str:
    """A file of `count` prompts."""
    lines = [json.dumps({"id": f"p/{i}", "turns": [f"w{7 + i % 80} w{20 + i // 80}"]}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)
