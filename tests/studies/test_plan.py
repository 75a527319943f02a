"""Which runs studies need, and which of them are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from study_data import write_pairs

from hnclip.config import TrainConfig
from hnclip.recipes import PAPER_RATES
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.plan import Place, plan
from hnclip.studies.settings import settings_of
from hnclip.studies.spec import Domain, GallerySpec, Setting, Study, Variant

INFONCE = Variant("InfoNCE", method="hn_clip", global_loss="infonce", set={"objective.token_weight": 0.0})
HN_CLIP = Variant("HN-CLIP", method="hn_clip", against=("InfoNCE",))
ROWS = (Variant("zero-shot", trained=False), INFONCE, HN_CLIP)


@pytest.fixture(scope="module")
def setting(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("plan")
    sources = [str(write_pairs(folder / style, style)) for style in ("park", "shelf")]
    base = TrainConfig(model=str(model_directory))
    return Setting(study("any"), base, tuple(Domain(source, (source,)) for source in sources), seeds=(1, 2))


def study(name: str, rows: tuple[Variant, ...] = ROWS, **more: object) -> Study:
    return Study(name, name, "?", rows, parts=("recalls",), **more)  # type: ignore[arg-type]


def test_equal_runs_are_one_with_the_galleries_and_observations_of_all(setting: Setting) -> None:
    crossed = study("crossed", columns="all")
    observed = study("observed", (INFONCE,), watch=True)
    probed = study("probed", (replace(INFONCE, name="again"),), probe=True)
    found = plan([replace(setting, study=one) for one in (study("own"), crossed, observed, probed)])
    assert len(found.runs) == 1 + 2 * 2 * 2  # the untrained model; rows, domains, seeds
    assert {tuple(job.galleries) for job in found.runs} == {
        tuple(GallerySpec(source) for domain in order for source in domain.galleries)
        for order in (setting.domains, setting.domains[::-1])
    }
    domain = setting.domains[0]
    job = found.of(observed)[Place("InfoNCE", domain.name, 1)]
    assert job is found.of(probed)[Place("again", domain.name, 1)]
    assert job is found.of(crossed)[Place("InfoNCE", domain.name, 1)]
    assert (job.config.watch, job.config.probe_gradients) == (domain.data, 5)


def test_measurements_name_the_runs_that_they_need(setting: Setting) -> None:
    measured = Study("measured", "", "?", ROWS[1:], parts=("geometry", "retrievals", "recalls", "step_time"))
    found = plan([replace(setting, study=one) for one in (measured, replace(measured, name="again"))])
    jobs = found.measures_of(measured)
    assert jobs == found.measures_of(replace(measured, name="again"))
    assert {kind for kind, _ in jobs} == {"geometry", "retrievals", "step_time"}
    assert len(jobs) == len(found.measures) == 6
    for (kind, domain), job in jobs.items():
        expected = [] if kind == "geometry" else [found.of(measured)[Place(row.name, domain, 1)] for row in ROWS[1:]]
        assert list(job.runs) == expected


def test_every_study_of_the_catalogue_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HNCLIP_DATA", raising=False)
    found = plan(settings_of("all", recipe="paper/docci", data=("docci", "dci")))
    assert {name for job in found.jobs for name in job.places} == set(STUDIES)
    rates = {place.row: job.config.optim.lr for job in found.runs for place in job.places.get("plug", ())}
    assert rates["GOAL"] == rates["GOAL + L_HN"] == PAPER_RATES["goal"]
