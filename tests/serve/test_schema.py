"""The served OpenAPI document is true: it declares what happens, and requests made from it meet nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve.support import CHAT, TEXT, WITH_TOOLS, Running, ScriptedEngine, byte_tokenizer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(ScriptedEngine(tokenizer=byte_tokenizer(WITH_TOOLS), max_model_len=4096)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def test_the_openapi_document_declares_what_happens(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    generation = {"200", "400", "404", "413", "429", "500", "503", "504"}
    statuses = {
        CHAT: generation,
        TEXT: generation,
        "/tokenize": {"200", "400", "404", "413", "500"},
        "/detokenize": {"200", "400", "404", "413", "500"},
        "/v1/models": {"200", "500"},
        "/v1/models/{model}": {"200", "404", "500"},
        "/health": {"200", "500", "503"},
        "/ready": {"200", "500", "503"},
        "/metrics": {"200", "500"},
    }
    found = {
        path: set(operation["responses"])
        for path, operations in document["paths"].items()
        for operation in operations.values()
    }
    assert found == statuses
    post = document["paths"][CHAT]["post"]["responses"]
    assert set(post["200"]["content"]) == {"application/json", "text/event-stream"}
    assert post["400"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorBody")
    data = post["200"]["content"]["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
    names = [body["$ref"].rsplit("/", 1)[1] for body in data[1]["contentSchema"]["anyOf"]]
    assert names == ["ChatCompletionChunk", "ErrorBody"]
    chunk = document["components"]["schemas"][names[0]]
    assert chunk["required"] == ["id", "object", "created", "model", "choices"]
    assert not {"HTTPValidationError", "ValidationError"} & set(document["components"]["schemas"])
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"]
    assert schema["additionalProperties"] is False


def test_the_openapi_document_declares_the_key() -> None:
    with serving(ScriptedEngine(), api_keys=("key",)) as running, running.client() as client:
        document = client.get("/openapi.json", headers={"Authorization": "Bearer key"}).json()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("401" in operation["responses"]) == (path not in ("/health", "/ready")) == ("security" in operation)


def schemathesis(server: Running, folder: Path, *options: str) -> None:
    """Run every check but one: that no request which fits the schemas is refused.

    The schemas cannot say what depends on the model (ids, lengths, its template) or on several fields at once.
    """
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color", *options]
    command += ["--exclude-checks", "positive_data_acceptance", "--warnings", "off"]
    command += ["--seed", "1", "--generation-deterministic", "--request-timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    server.wait_idle()


def test_requests_made_from_the_document(server: Running, tmp_path: Path) -> None:
    schemathesis(server, tmp_path, "--phases", "examples,fuzzing", "--max-examples", "10")


@pytest.mark.slow
def test_many_requests_made_from_the_document(server: Running, tmp_path: Path) -> None:
    schemathesis(server, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "200")
