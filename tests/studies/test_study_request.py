"""From options to settings: recipes, domains, galleries, rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from hnclip.config import ReadConfig, RunOptions, SpeedConfig
from hnclip.options import Study as Options
from hnclip.recipes import PAPER_GALLERIES, PAPER_RATES, RECIPES, miniature, paper
from hnclip.studies import request
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.forecast import identify_unseen
from hnclip.studies.names import studies_named
from hnclip.studies.plan import plan
from hnclip.studies.request import domains_of, entries_of, is_here, parse_fields, recipe_of, run_options_of, setting_of
from hnclip.studies.variant import resolve

READ = ReadConfig()


def options(name: str = "main", **more: object) -> Options:
    return Options(name=name, read=READ, **more)  # type: ignore[arg-type]


def galleries(data: list[str], tests: list[str], *, as_paper: bool) -> list[tuple[str, ...]]:
    return [domain.galleries for domain in domains_of(data, tests, READ, paper=as_paper)]


def test_galleries_belong_to_the_domain_that_the_paper_trains_them_on() -> None:
    assert galleries(["docci", "dci", "vg-paragraphs"], [], as_paper=True) == [*PAPER_GALLERIES.values()]
    assert galleries(["docci", "dci"], ["long-dci"], as_paper=False) == [("docci",), ("dci", "long-dci")]
    assert galleries(["vg-paragraphs"], ["urban-1k"], as_paper=False) == [("vg-paragraphs", "urban-1k")]
    # Without its own domain it is a test of everybody, as any other.
    assert galleries(["docci"], ["long-dci"], as_paper=False) == [("docci", "long-dci")]
    assert galleries(["docci", "dci"], ["iiw"], as_paper=False) == [("docci", "iiw"), ("dci", "iiw")]


def test_folders_are_kept_and_shared_where_the_files_are_the_same() -> None:
    assert galleries(["dci=/d"], [], as_paper=True) == [("dci=/d", "long-dci=/d")]
    assert galleries(["vg-paragraphs=/v"], [], as_paper=True) == [("urban-1k",)]
    assert galleries(["vg-paragraphs=/v"], ["urban-1k=/u"], as_paper=True) == [("urban-1k=/u",)]


def test_data_without_a_test_split_need_one() -> None:
    with pytest.raises(ValueError, match="sharegpt4v has no test split"):
        domains_of(["sharegpt4v"], [], READ, paper=False)
    assert galleries(["sharegpt4v"], ["urban-1k"], as_paper=False) == [("urban-1k",)]


def test_the_recipe_follows_the_model() -> None:
    assert recipe_of(options()) == "demo"
    assert recipe_of(options(model="bundled")) == "demo"
    assert recipe_of(options(model="openai/clip-vit-base-patch16")) == "paper"
    assert recipe_of(options(model="openai/clip-vit-base-patch16", recipe="tiny")) == "tiny"


@pytest.mark.parametrize("name", ["docci", "dci", "urban-1k"])
def test_paper_recipes_are_the_papers_settings(name: str) -> None:
    config = RECIPES[f"paper/{name}"]()
    optim, objective = config.optim, config.objective
    assert (config.model, config.context) == ("longclip-L.pt", 248)
    assert config.data == ("vg-paragraphs" if name == "urban-1k" else name)
    assert (optim.lr, optim.schedule, optim.epochs, optim.micro_batch, optim.accumulate) == (2e-6, "cosine", 10, 16, 8)
    assert (objective.gamma, objective.token_weight, objective.global_loss) == (0.5, 1.0, "hn")
    assert optim == paper().optim
    assert config.data in PAPER_GALLERIES


def test_baselines_have_their_own_rates_with_the_papers_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HNCLIP_DATA", raising=False)
    setting = setting_of(options("plug", recipe="paper/docci"))
    jobs = plan([STUDIES["plug"]], setting, identify=identify_unseen)
    rates = {place.row: job.config.optim for job in jobs for place in job.places["plug"]}
    for row, plug in (("FineLIP", "finelip"), ("GOAL", "goal"), ("StructXLIP", "structxlip"), ("LoRA", "lora")):
        assert rates[row].lr == rates[f"{row} + L_HN"].lr == PAPER_RATES[plug]  # type: ignore[index]
    assert rates["FineLIP"].readout_lr == 2e-4
    assert rates["InfoNCE"].lr == rates["L_HN"].lr == 2e-6
    assert next(job.config.adapt.rank for job in jobs if job.config.adapt.method == "lora") == 16
    assert setting_of(options("plug", recipe="demo")).rates == {}


def test_set_reaches_every_row_and_what_a_row_says_wins() -> None:
    setting = setting_of(options("gamma", set=("optim.epochs=1", "objective.gamma=0.9", "fraction=0.5")))
    jobs = plan([STUDIES["gamma"]], setting)
    assert {job.config.optim.epochs for job in jobs} == {1}
    assert {job.config.objective.gamma for job in jobs} == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert {job.config.fraction for job in jobs} == {0.5}
    assert len(jobs) == 15


def test_values_are_json_or_text() -> None:
    values = ["optim.scale_max=null", "optim.negatives=batch", "objective.parameters.beta=0.5", 'tokenizer="1"']
    assert parse_fields(values) == {
        "optim.scale_max": None,
        "optim.negatives": "batch",
        "objective.parameters.beta": 0.5,
        "tokenizer": "1",
    }


def test_all_leaves_out_what_needs_two_domains_and_says_so(caplog) -> None:
    caplog.set_level("INFO", logger="hnclip")
    found = entries_of(options("all", data=("scenes/park/small",)))
    assert len(found) == len(STUDIES) - 2
    assert "cross-domain, transfer left out" in caplog.messages[0]
    both = entries_of(options("all", data=("scenes/park/small", "scenes/shelf/small")))
    assert len(both) == len(STUDIES)
    assert studies_named("gamma, main,gamma") == [STUDIES["gamma"], STUDIES["main"]]


def test_the_miniature_has_settings_of_its_own() -> None:
    found = entries_of(options("miniature"))
    assert {study.name for study, _ in found} == {*STUDIES}
    assert next(setting for study, setting in found if study.name == "main").base.optim == miniature().optim


def test_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.pt").touch()
    assert all(map(is_here, ["bundled", "here.pt", "owner/model", "owner/a+owner/b"]))
    assert not any(map(is_here, ["longclip-L.pt", "models/longclip-L.pt", "nowhere", "owner/a+nowhere"]))


@pytest.mark.parametrize("name", ["global_loss=infonce", "token_weight=0.5", "margin_source=frozen"])
def test_what_rows_differ_in_cannot_be_set_for_all(name: str) -> None:
    with pytest.raises(ValueError, match="is what the rows of a study differ in"):
        setting_of(options(set=(f"objective.{name}",)))


def test_what_is_set_for_all_rows_reaches_all_of_them() -> None:
    setting = setting_of(options(set=("objective.mask-duplicates=false", "objective.gamma=0.3")))
    for row in STUDIES["plug"].rows:
        objective = resolve(setting.base, row).objective
        assert (objective.mask_duplicates, objective.gamma) == (False, 0.3)


def test_a_rate_that_is_set_is_everybodys() -> None:
    assert setting_of(options(recipe="miniature")).rates
    assert not setting_of(options(recipe="miniature", set=("optim.lr=1e-5",))).rates


@pytest.mark.parametrize("set_fields", [(), ("optim.precision=auto",)])
def test_auto_is_resolved_when_a_setting_is_made(set_fields: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in fp32 and in bf16 are not one run because both asked for auto."""
    asked = options(recipe="paper", data=("scenes/park/small",), set=set_fields)
    for precision in ("fp32", "bf16"):
        monkeypatch.setattr(request, "choose_precision", lambda wanted, device, precision=precision: precision)
        assert setting_of(asked).base.optim.precision == precision


def test_options_of_the_runs_can_be_set_too() -> None:
    """They change no run."""
    plain = options(device="cpu", threads=2)
    asked = options(device="cpu", threads=2, set=("speed.recompute=true", "save-minutes=1", "optim.epochs=2"))
    assert run_options_of(plain) == RunOptions(device="cpu", threads=2)
    assert run_options_of(asked) == RunOptions(
        device="cpu", threads=2, speed=SpeedConfig(recompute=True), save_minutes=1.0
    )
    assert setting_of(asked) == setting_of(options(set=("optim.epochs=2",)))
    with pytest.raises(ValueError, match=r"--set: save_minutes: .*greater than or equal to 0, got -1"):
        run_options_of(options(set=("save_minutes=-1",)))
