"""The example of GRPO in a real run with followers, and a folder of deltas of that run."""

import json
import shutil

import jax
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from safetensors import safe_open

import diloco
from diloco.learner.tensors import tree
from diloco.run.model.deltas import served_folder
from diloco.run.model.serving import FolderRules


@pytest.fixture(scope="module")
def grpo_home(tmp_path_factory):
    from examples import grpo

    home = tmp_path_factory.mktemp("grpo")
    grpo.run(home)
    return home


@pytest.mark.long
def test_grpo_learns_sums_by_the_samples_of_followers_which_say_what_wrote_them(grpo_home):
    # Not at import, where every worker of the tests would wait for the model.
    from examples import grpo

    assert grpo.curve(grpo_home / "samples")[-1] > 0.8
    batches = sorted((grpo_home / "samples" / "learner-0").glob("??????.npz"))
    for path in batches[:: len(batches) // 3]:
        batch = np.load(path)
        with diloco.follow(grpo_home / "run", stay_at=int(batch["version"][0])) as model:
            leaves = {leaf.name: leaf.values for leaf in next(model).leaves}
        params = tree.from_names(jax.eval_shape(grpo.initial), leaves)
        logp = jax.nn.log_softmax(grpo.MODEL.logits(params, batch["prompts"])[:, -1])
        told = np.take_along_axis(np.asarray(logp), batch["answers"][:, None], 1)[:, 0]
        np.testing.assert_allclose(told, batch["logp"], atol=1e-5)


def applied(base, delta):
    """The bytes of a folder's tensors after a delta, as its index says that they are had."""
    form = json.loads((delta / "model.safetensors.index.json").read_text())["metadata"]
    assert form["delta_encoding"] == "xor"
    found = {}
    for path in delta.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            for name, checksum in file.metadata().items():
                packed = file.get_tensor(name).tobytes()
                older = np.frombuffer(base[name], np.uint8)
                changed = pa.decompress(packed, len(older), codec=form["compression_format"])
                found[name] = (older ^ np.frombuffer(changed, np.uint8)).tobytes()
                assert xxhash.xxh3_128_hexdigest(found[name]) == checksum
    return form["base_version"], found


def tensors_of(folder):
    with safe_open(folder / "model.safetensors", "flax") as file:
        return {name: np.asarray(file.get_tensor(name)).tobytes() for name in file.keys()}  # noqa: SIM118


@pytest.mark.long
def test_a_folder_of_deltas_leads_to_every_version_bit_for_bit(grpo_home, tmp_path, run_async):
    async def serve(version, keep):
        async with diloco.follow(grpo_home / "run", stay_at=version) as model:
            folder = served_folder(model, FolderRules(tmp_path / "to", "deltas", keep))
            return await folder.take(await model.take_async())

    held = tensors_of(run_async(serve(10, 1)))
    for number, version in enumerate((11, 12), 2):
        path = run_async(serve(version, 1))
        assert (path, path.name) == (
            (tmp_path / "to" / "latest").resolve(),
            f"weight_v00000{number}",
        )
        base, held = applied(held, path)
        assert int(base) == number - 1
        assert held == tensors_of(tmp_path / "to" / f".whole-00000{number}")
        assert run_async(serve(version, 1)) == path  # started again
    # Nothing leads to them but the whole one, which stays; without it the next one is whole.
    assert len(list((tmp_path / "to").glob("weight_v*"))) == 3
    shutil.rmtree(tmp_path / "to" / ".whole-000003")
    assert tensors_of(run_async(serve(13, 1)))
    assert [one.name for one in (tmp_path / "to").glob("weight_v*")] == ["weight_v000004"]
