"""Starting, health, models and what the server says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fake_served import MAX_LEN, MODEL

from treadle.http.state import ServerState

if TYPE_CHECKING:
    from tests.http.conftest import Serve, Served

WORK = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/generate"),
    ("POST", "/abort_request"),
]
INFO = ["/v1/models", f"/v1/models/{MODEL}", "/server_info", "/model_info", "/health", "/ready"]


@pytest.mark.parametrize(("method", "path"), [*WORK, *(("GET", path) for path in INFO)])
async def test_starting_server_says_503(serve: Serve, method: str, path: str) -> None:
    served = await serve(has_engine=False)
    async with served.session.request(method, served.url + path, json={}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        error = (await response.json())["error"]
        assert error["type"] == "service_unavailable"
        assert "starting" in error["message"]


async def test_engine_that_comes_later_is_served(serve: Serve) -> None:
    served = await serve(has_engine=False)
    served.state.engine = served.engine
    assert (await served.post("/generate", {"text": "a"}))[0] == 200


@pytest.mark.parametrize(("path", "key"), [("/health", "healthy"), ("/ready", "is_ready")])
async def test_probe_follows_the_engine(served: Served, path: str, key: str) -> None:
    for value, status in ((True, 200), (False, 503), (True, 200)):
        setattr(served.engine, key, value)
        async with served.session.get(served.url + path) as response:
            assert response.status == status
    assert served.engine.submitted == [], "a probe makes no token"


async def test_probes_answer_head(served: Served) -> None:
    for path in ("/", "/health", "/ready"):
        async with served.session.head(served.url + path) as response:
            assert response.status == 200


async def test_closed_engine_is_503(served: Served) -> None:
    served.engine.is_ready = False
    status, answer = await served.post("/generate", {"text": "a"})
    assert (status, answer["error"]["type"]) == (503, "service_unavailable")


async def test_draining_server_refuses_new_work_only(served: Served) -> None:
    served.state.is_draining = True
    for method, path in [*WORK[:3], ("GET", "/ready"), ("GET", "/health")]:
        async with served.session.request(method, served.url + path, json={}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert "shutting down" in (await response.json())["error"]["message"]
    async with served.session.get(served.url + "/v1/models") as response:
        assert response.status == 200
    assert (await served.post("/abort_request", {"rid": "x"}))[0] == 200


async def test_models_are_listed_as_a_gateway_reads_them(served: Served) -> None:
    async with served.session.get(served.url + "/v1/models") as response:
        listed = await response.json()
    card = listed["data"][0]
    assert listed["object"] == "list"
    assert (card["id"], card["object"], card["owned_by"]) == (MODEL, "model", "sglang")
    assert card["max_model_len"] == MAX_LEN
    async with served.session.get(f"{served.url}/v1/models/{MODEL}") as response:
        assert await response.json() == card


@pytest.mark.parametrize("name", ["other", "a/b", "x%00y", "%ED%A0%80"])
async def test_unknown_model_card_is_404(served: Served, name: str) -> None:
    async with served.session.get(f"{served.url}/v1/models/{name}") as response:
        assert response.status == 404
        error = (await response.json())["error"]
        assert error["code"] == "model_not_found"
        assert MODEL in error["message"]


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_is_flat(served: Served, path: str) -> None:
    async with served.session.get(served.url + path) as response:
        info = await response.json()
    assert info["served_model_name"] == MODEL
    assert info["page_size"] == 1
    assert info["max_total_num_tokens"] == 1000
    assert info["status"] == "ready"
    assert info["internal_states"][0]["last_gen_throughput"] == 12.5
    assert info["tp_size"] == 1


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_has_its_fields(served: Served, path: str) -> None:
    async with served.session.get(served.url + path) as response:
        info = await response.json()
    assert info["model_path"] == "/models/tiny"
    assert info["is_generation"] is True
    assert info["architectures"] == ["LlamaForCausalLM"]


async def test_version_is_not_answered(served: Served) -> None:
    """A gateway takes an engine that answers here for another one."""
    async with served.session.get(served.url + "/version") as response:
        assert response.status == 404


async def test_state_is_idle_only_without_work(served: Served) -> None:
    state = ServerState()
    state.engine = served.engine
    with state.working(), state.working():
        assert not state._idle.is_set()
    assert state._idle.is_set()
