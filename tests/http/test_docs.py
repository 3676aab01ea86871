"""The API's description names every route and every sampling parameter, each for what it is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from treadle.engine import sampling_params
from treadle.engine.sampling_params import SamplingParams
from treadle.http.app import create_app
from treadle.http.state import ServerState

TEXT = (Path(__file__).parents[2] / "docs/http-api.md").read_text()
WORDS = set(re.findall(r"`([^`]+)`", TEXT))


async def test_every_route_is_described() -> None:
    resources = create_app(ServerState()).router.resources()
    paths = {resource.canonical.replace("{model}", "{id}") for resource in resources}
    plain = {path for path in paths if not path.startswith("/get_") or path == "/get_load"}
    assert {path.removeprefix("/get_") for path in paths - plain} == {"model_info", "server_info"}
    assert {path for path in plain if not any(word.startswith(path) for word in WORDS)} == set()


def test_every_sampling_parameter_is_described() -> None:
    assert {field.name for field in fields(SamplingParams)} <= WORDS


def test_parameters_without_an_effect_yet_are_listed() -> None:
    listed = re.search(r"only the neutral value passes yet: (.*?)\.", TEXT, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(sampling_params._NOT_BUILT)
