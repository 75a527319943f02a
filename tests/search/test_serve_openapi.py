"""The API follows its OpenAPI schema: schemathesis sends requests that the schema allows, and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.openapi import from_dict
from schemathesis.specs.openapi.checks import positive_data_acceptance
from serve_helpers import Live, live, scene_index

from hnclip.search.serve.app import make_app
from hnclip.search.serve.run import Settings
from hnclip.search.serve.service import Service

TOKEN = "open sesame"
unused: Any = None  # no request is sent to this application
schema = from_dict(make_app(Service(unused, Settings()), token=TOKEN, hosts=None).openapi())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(scene_index(tmp_path_factory.mktemp("openapi"), 4), token=TOKEN) as found:
        yield found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipped test cases with unsupported payload")  # it makes JPEG and PNG, but no TIFF
@schema.parametrize()
@settings(max_examples=8, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_response_is_as_documented(case: schemathesis.Case, server: Live) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    # A text without words is refused, which the schema cannot say.
    case.call_and_validate(base_url=server.address, headers=headers, excluded_checks=[positive_data_acceptance])
