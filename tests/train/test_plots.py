"""Figures say what they show, files are valid PNGs, and TensorBoard gets every number or a clear refusal."""

from __future__ import annotations

import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from jetflow_train import tensorboard
from jetflow_train.plots import ablation_figure, draw_training, read_metrics, save_figure, training_figure
from jetflow_train.tensorboard import require_tensorboard, scalar_log, scalars


def logged(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "blocks": 96 * step, "elapsed": 1.0 * step, "loss": loss, "marginal_loss": loss + 1}


def measured(step: int, tau: float) -> dict[str, Any]:
    held = {"conditional_kl": 2.0, "accepted_length": tau - 0.5, "conditional_accuracy": [0.5, 0.25]}
    return {"step": step, "blocks": 96 * step, "held_out": held, "replayed_tau": {"8": tau, "32": tau + 0.5}}


RECORDS = [logged(20, 5.0), logged(40, 4.0), measured(40, 1.5), logged(60, 3.0), measured(60, 1.9)]


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file whose every chunk has its right checksum."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    place, names = 8, []
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        body = content[place + 4 : place + 8 + length]
        assert struct.unpack(">I", content[place + 8 + length : place + 12 + length])[0] == zlib.crc32(body)
        names.append(body[:4])
        place += 12 + length
    assert (names[0], names[-1]) == (b"IHDR", b"IEND")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def lines_of(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_loss_and_tau_over_blocks_and_steps() -> None:
    left, right = training_figure(RECORDS).axes
    loss, tau = lines_of(left), lines_of(right)
    assert loss["training"] == ([1920, 3840, 5760], [5.0, 4.0, 3.0])
    assert set(loss) == {"training", "training, unconditioned", "held out, forward KL"}
    assert tau["replayed, budget 8"] == ([3840, 5760], [1.5, 1.9])
    assert tau["replayed, budget 32"] == ([3840, 5760], [2.0, 2.4])
    assert set(tau) == {"replayed, budget 8", "replayed, budget 32", "a chain, from teacher-forced accuracy"}
    assert (left.get_xlabel(), right.get_ylabel()) == ("blocks", "τ, tokens a target pass")
    (above,) = left.child_axes
    left.set_xlim(0, 9600)
    assert (above.get_xlabel(), above._functions[0](9600)) == ("steps", 100)


def test_a_run_without_held_out_rows_has_a_plot() -> None:
    left, right = training_figure([logged(20, 5.0)]).axes
    assert "training" in lines_of(left)
    assert not lines_of(right)


def test_the_file_is_a_png(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    width, height = png_size(draw_training(tmp_path))
    assert width > height > 300
    with pytest.raises(ValueError, match=r"nowhere/a.png: cannot write the plot"):
        save_figure(training_figure(RECORDS), tmp_path / "nowhere" / "a.png")


def test_what_a_resumed_run_repeats_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    repeated = [logged(20, 5.0), logged(40, 4.0), logged(60, 3.0), logged(40, 4.0), logged(60, 3.5), measured(60, 2.0)]
    file.write_text("".join(json.dumps(each) + "\n" for each in repeated) + '{"step": 80, "lo')
    records = read_metrics(file)
    assert [(each["step"], each.get("loss")) for each in records] == [
        (20, 5.0),
        (40, 4.0),
        (60, 3.5),
        (60, None),
    ]


def test_an_ablation_has_a_panel_for_each_thing_varied(tmp_path: Path) -> None:
    panels = {
        "loss": {"forward KL": {8: 1.9, 32: 2.2}, "reverse KL": {8: 1.7, 32: 2.0}},
        "layers": {"3": {8: 1.9, 32: 2.2}, "1": {8: 1.6}},
        "taps": {"5": {8: 1.9, 32: 2.2}},
        "data": {"regenerated": {8: 1.9, 32: 2.2}},
    }
    figure = ablation_figure(panels, "τ, replayed")
    assert [axes.get_title() for axes in figure.axes] == ["loss", "layers", "taps", "data", "", ""]
    assert [axes.axison for axes in figure.axes] == [True] * 4 + [False] * 2
    loss = figure.axes[0]
    assert lines_of(loss)["reverse KL"] == ([0, 1], [1.7, 2.0])
    assert [label.get_text() for label in loss.get_xticklabels()] == ["8", "32"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["forward KL", "reverse KL"]
    assert (loss.get_xlabel(), loss.get_ylabel()) == ("node budget", "τ, replayed")
    png_size(save_figure(figure, tmp_path / "ablation.png"))


# -- TensorBoard --------------------------------------------------------------------------------------------------------


def test_every_number_of_a_record_is_a_scalar() -> None:
    assert dict(scalars(measured(40, 1.5))) == {
        "held_out/conditional_kl": 2.0,
        "held_out/accepted_length": 1.0,
        "held_out/conditional_accuracy/1": 0.5,
        "held_out/conditional_accuracy/2": 0.25,
        "replayed_tau/8": 1.5,
        "replayed_tau/32": 2.0,
    }
    assert dict(scalars(logged(20, 5.0))) == {"loss": 5.0, "marginal_loss": 6.0}


def test_tensorboard_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "PACKAGE", "a_package_that_nobody_has")
    with (
        pytest.raises(ValueError, match=r"--tensorboard needs the package tensorboard: `pip install tensorboard`"),
        scalar_log(tmp_path, wanted=True),
    ):
        pass
    with scalar_log(tmp_path / "log", wanted=False) as write:
        write({"step": 1, "loss": 2.0})
    assert not list(tmp_path.iterdir())


def test_scalars_go_to_the_writer_at_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            written.append((folder,))

        def __enter__(self) -> Writer:
            return self

        def __exit__(self, *_: object) -> None:
            written.append(("closed",))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

    module = type("Module", (), {"SummaryWriter": Writer})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(tensorboard, "PACKAGE", "json")
    require_tensorboard()
    with scalar_log(tmp_path, wanted=True) as write:
        write(logged(20, 5.0))
    assert written == [(str(tmp_path),), ("loss", 5.0, 20), ("marginal_loss", 6.0, 20), ("closed",)]
