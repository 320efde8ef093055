"""schemathesis reads the OpenAPI schema of the app, and asks what it allows and what it does not: no answer may be a failure."""

import pytest

pytest.importorskip("fastapi", reason="needs the package fastapi")
schemathesis = pytest.importorskip("schemathesis", reason="needs the package schemathesis")

from hypothesis import HealthCheck, settings  # noqa: E402
from schemathesis import checks  # noqa: E402

from attemper_lab.page.server.app import make  # noqa: E402

OPENAPI = make(["127.0.0.1:1"], "t").inner.openapi()
schema = schemathesis.openapi.from_dict(OPENAPI).include(
    path_regex="^/(?!.*events$)"
)  # streams do not end by themselves


HOW = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


@schema.parametrize()
@settings(max_examples=6, **HOW)
def test_what_the_schema_allows_and_what_not(live, case):
    judged(live, case)


@pytest.mark.exhaustive
@schema.parametrize()
@settings(max_examples=100, **HOW)
def test_more_of_what_the_schema_allows_and_what_not(live, case):
    judged(live, case)


def judged(live, case):
    answer = case.call(base_url=f"http://{live.host}", headers={"Authorization": f"Bearer {live.token}"}, timeout=60)
    case.validate_response(
        answer, checks=[checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
    )
    assert "content-security-policy" in answer.headers


def test_the_schema_has_bounds():
    bodies = OPENAPI["components"]["schemas"]
    for name in ("Sentence", "HeadOfSentence", "RunSettings"):
        assert bodies[name]["additionalProperties"] is False
        for key, about in bodies[name]["properties"].items():
            limits = {
                "string": {"maxLength"},
                "integer": {"minimum", "maximum"},
                "number": {"minimum", "maximum"},
                "array": {"maxItems"},
            }
            upper = limits[about["type"]] if "exclusiveMaximum" not in about else {"minimum", "exclusiveMaximum"}
            assert upper <= set(about), (name, key)
