"""The wrong fleets of wrong_fleets.toml: the check refuses each with a sentence, but for those that are named here."""

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from small_release import archive_of

from diloco.common.protocol.errors import ConfigError
from diloco.infra.provision.plan import check
from diloco.operate.auth import nats_config_and_credentials as auth

EXAMPLES = Path(__file__).parents[2] / "infra" / "terraform" / "examples"
DRAWN: dict[str, dict[str, Any]] = {
    name: case
    for cases in tomllib.loads(Path(__file__).with_name("wrong_fleets.toml").read_text()).values()
    for name, case in cases.items()
}
RUN_FILES = {"small": "run.toml", "gemma-12b": "gemma-12b-run.toml"}
# What surely fails or wastes, and is accepted all the same.
ACCEPTED: set[str] = set()
# What pydantic and a pattern say, to those who know them.
RAW = re.compile(r"Input should|String should|List should|Value error|\\d|\^\[|\[a-z|pattern|Assertion failed|validat")  # fmt: skip


def make_auth(folder: Path, run: str, learners: list[str]) -> None:
    hosts = ["10.64.0.11", "10.64.0.12", "10.64.0.13"]
    at = {"installed_at": Path("/etc/nats"), "streams_at": Path("/var/lib/nats/jetstream")}
    auth.init(folder, run, hosts, **at)
    for name in ("aggregator-a", "aggregator-b"):
        auth.add(folder, name, "aggregator")
    for name in learners:
        auth.add(folder, name, "learner")
    auth.add(folder, "watch", "reader")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the files that operators of the shipped fleets have, in a folder for each fleet."""
    folder = tmp_path_factory.mktemp("operators")
    for fleet, run in RUN_FILES.items():
        place = folder / fleet
        document = tomllib.loads((EXAMPLES / f"{fleet}.toml").read_text())
        name = tomllib.loads((EXAMPLES / run).read_text())["run"]["name"]
        learners = list(document["learners"])
        make_auth(place / "auth", name, learners)
        make_auth(place / "other", name, learners)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(auth, "_VALID_DAYS", 0)
            make_auth(place / "expired", name, learners)
        for kind in ("cpu", "tpu"):
            archive_of(place / f"{kind}.tar.gz", kind=kind)
    return folder


def set_key(document: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        document = document.setdefault(parent, {})
    if value == "":
        document.pop(last, None)
    else:
        document[last] = value


def as_drawn(place: Path, case: dict[str, Any]) -> Path:
    """Write a fleet of the drawing over the files of an operator; the path of its file."""
    fleet = case.get("of", "small")
    document = tomllib.loads((EXAMPLES / f"{fleet}.toml").read_text())
    document |= {"auth_folder": "auth", "run_toml": "run.toml"}
    document["releases"] = {"cpu": "cpu.tar.gz", "tpu": "tpu.tar.gz"}
    run = tomllib.loads((EXAMPLES / RUN_FILES[fleet]).read_text())
    for path, value in case.get("fleet", {}).items():
        set_key(document, path, value)
    for path, value in case.get("run", {}).items():
        set_key(run, path, value)
    for name in document["learners"]:
        if auth.valid_name(name) and not (place / "auth" / "credentials" / f"{name}.toml").exists():
            auth.add(place / "auth", name, "learner")
    for name, (old, new) in case.get("text", {}).items():
        assert old in (place / name).read_text()
        (place / name).write_text((place / name).read_text().replace(old, new))
    for name, source in case.get("copied", {}).items():
        shutil.copy(place / source, place / name)
    if "gone" in case:
        (place / case["gone"]).unlink()
    (place / "run.toml").write_text(tomli_w.dumps(run))
    (place / "fleet.toml").write_text(tomli_w.dumps(document))
    return place / "fleet.toml"


def refusals(path: Path) -> list[str]:
    try:
        return [one.sentence for one in check(path).refused]
    except ConfigError as error:
        return [error.message]


def test_there_are_as_many_as_were_drawn_and_few_are_accepted() -> None:
    assert len(DRAWN) == 177
    assert DRAWN.keys() >= ACCEPTED
    assert len(ACCEPTED) <= 5


@pytest.mark.parametrize("fleet", RUN_FILES)
def test_a_shipped_fleet_as_drawn_without_a_change_is_right(
    prepared: Path, tmp_path: Path, fleet: str
) -> None:
    place = Path(shutil.copytree(prepared / fleet, tmp_path / "operator"))
    assert refusals(as_drawn(place, {"of": fleet})) == []


@pytest.mark.parametrize("name", DRAWN)
def test_a_wrong_fleet_is_refused_with_a_sentence(
    prepared: Path, tmp_path: Path, name: str
) -> None:
    case = DRAWN[name]
    place = Path(shutil.copytree(prepared / case.get("of", "small"), tmp_path / "operator"))
    found = refusals(as_drawn(place, case))
    assert bool(found) is (name not in ACCEPTED), found
    for sentence in found:
        assert not RAW.search(sentence), sentence
