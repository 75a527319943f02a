"""The API is what its own description says: schemathesis asks all that it allows, and much that it forbids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.openapi import from_dict
from serve_helpers import ask, listening, make_index

from hnclip.search.options import ServeOptions
from hnclip.search.serve.app import make_app

TOKEN = "open sesame"


def described(token: str | None) -> dict[str, Any]:
    nobody: Any = None  # answers, for nobody asks
    return make_app(nobody, ServeOptions(index=Path("park.hnc")), token=token).openapi()


schema = from_dict(described(TOKEN))


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with listening(make_index(tmp_path_factory.mktemp("openapi"), 4), token=TOKEN) as (found, _):
        yield found


@pytest.mark.filterwarnings("ignore:Skipped test cases with unsupported payload")  # it makes no TIFF, but JPEG and PNG
@schema.parametrize()
@settings(max_examples=8, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_answers_in_another_way_than_is_described(case: schemathesis.Case, port: int) -> None:
    case.call_and_validate(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {TOKEN}"})


def test_the_description_is_given_out_and_says_the_limits_and_the_failures(port: int) -> None:
    assert ask(port, "/openapi.json") == (200, described(TOKEN))
    found = described(None)
    assert found["components"]["schemas"]["SearchRequest"]["properties"]["k"]["maximum"] == 200
    assert found["components"]["schemas"]["ExplainRequest"]["properties"]["text"]["maxLength"] == 20_000
    assert found["components"]["schemas"]["ExplainRequest"]["properties"]["id"]["maximum"] == 2**53 - 1
    (k,) = (one for one in found["paths"]["/api/search/image"]["post"]["parameters"] if one["name"] == "k")
    assert k["schema"]["maximum"] == 200
    assert "securitySchemes" not in found["components"]
    assert "HTTPValidationError" not in str(found)
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Failure"}}}
    for methods in found["paths"].values():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                assert status < "400" or answer["content"] == failure
    assert {"413", "422", "503", "504"} <= set(found["paths"]["/api/search"]["post"]["responses"])
