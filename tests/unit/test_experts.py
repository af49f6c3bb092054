"""Experts of a layer: both ways to compute them, a mesh, their load, and experts from an MLP."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diloco.common.process.config import MeshSection, make_config
from diloco.common.protocol.errors import ConfigError, TaskError
from diloco.learner.island import Island
from diloco.learner.tensors.mesh import make_mesh, param_shardings, within
from diloco.learner.tensors.tree import by_name
from diloco.models.decoders import checkpoint, model
from diloco.models.decoders.config import CONFIG, config_document, parse_config
from diloco.models.decoders.experts import Load, block_rows, by_blocks, by_groups, mixed
from diloco.models.decoders.files import HuggingFace
from diloco.models.decoders.layer_kinds import Experts
from diloco.models.decoders.lora import LoraOptions, read_lora
from diloco.models.decoders.task import matrices, partition_of
from diloco.models.decoders.tensor_names_and_shapes import multiplied, table
from tests.models.cases import LLAMA, MIXTRAL, QWEN3, QWEN3_MOE

EXPERTS = Experts(count=6, chosen=2, width=8, normed=True, balance=0.1)
WIDTH = 16
PLAIN = model.Compute(remat=False)  # compiles faster


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def layer_of(experts, router=1.0):
    shape = (experts.count, WIDTH, experts.width)
    return {
        "router": router * drawn(WIDTH, experts.count, seed=1),
        "expert_gate": drawn(*shape, seed=2),
        "expert_up": drawn(*shape, seed=3),
        "expert_down": drawn(shape[0], shape[2], shape[1], seed=4),
    }


def one_by_one(experts, x, layer):
    """Each token through each of its experts, in NumPy."""
    x, layer = np.asarray(x, np.float64), {k: np.asarray(v, np.float64) for k, v in layer.items()}
    told = np.zeros_like(x)
    for place in np.ndindex(x.shape[:2]):
        scores = np.exp(x[place] @ layer["router"])
        shares = scores / scores.sum()
        chosen = np.argsort(-shares)[: experts.chosen]
        whole = shares[chosen].sum() if experts.normed else 1.0
        for number in chosen:
            gate = x[place] @ layer["expert_gate"][number]
            h = gate / (1 + np.exp(-gate)) * (x[place] @ layer["expert_up"][number])
            told[place] += shares[number] / whole * (h @ layer["expert_down"][number])
    return told


@pytest.mark.parametrize("normed", [True, False])
def test_each_token_gets_what_its_experts_make_of_it(normed):
    experts = dataclasses.replace(EXPERTS, normed=normed)
    x, layer = drawn(2, 20, WIDTH), layer_of(experts)
    found, load = jax.jit(functools.partial(mixed, experts, jax.nn.silu))(x, layer)
    wanted = one_by_one(experts, x, layer)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    assert float(load.chosen.sum()) == pytest.approx(experts.chosen)
    assert float(load.probability.sum()) == pytest.approx(1.0)


# All rows of one expert, experts without a row, and rows that fill no block.
@pytest.mark.parametrize("sizes", [(40, 0, 0), (0, 1, 39), (13, 14, 13)])
def test_blocks_and_groups_compute_the_same_and_have_the_same_gradient(sizes):
    rows, layer = drawn(40, WIDTH), layer_of(dataclasses.replace(EXPERTS, count=3))
    given = [rows, *(layer[name] for name in ("expert_gate", "expert_up", "expert_down"))]
    weight = drawn(40, WIDTH, seed=5)

    def measured(way, rows, *three):
        return jnp.vdot(way(jax.nn.silu, rows, jnp.asarray(sizes), *three), weight)

    def gradient(way):
        return jax.jit(jax.value_and_grad(functools.partial(measured, way), (0, 1, 2, 3)))(*given)

    for one, other in zip(
        jax.tree.leaves(gradient(by_blocks)), jax.tree.leaves(gradient(by_groups)), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))


def test_a_block_is_as_large_as_an_equal_load():
    assert block_rows(16_384, 128) == 128
    assert block_rows(64, 128) == 8


@pytest.mark.parametrize(
    ("mesh", "router"),
    [
        pytest.param("fsdp=2,tensor=2", 1.0, marks=pytest.mark.long),
        pytest.param("data=2,fsdp=1", 1.0, marks=pytest.mark.long),
        # Experts of all tokens on few devices: places for rows are filled.
        ("fsdp=1,expert=3", 30.0),
        pytest.param("data=1,fsdp=1,expert=2,tensor=2", 1.0, marks=pytest.mark.long),
        pytest.param("fsdp=1,expert=6", 1.0, marks=pytest.mark.long),
    ],
)
def test_a_mesh_computes_the_same(mesh, router):
    layer, weight = layer_of(EXPERTS, router), drawn(6, 10, WIDTH, seed=5)

    def measured(x, layer):
        y, load = mixed(EXPERTS, jax.nn.silu, x, layer)
        every = Load(load.chosen[None], load.probability[None])
        return jnp.vdot(y, weight) + every.loss(), (y, load)

    function = jax.jit(jax.value_and_grad(measured, (0, 1), has_aux=True))
    wanted = function(drawn(6, 10, WIDTH), layer)
    section = MeshSection.model_validate(mesh)
    with within(make_mesh(section, jax.devices()[: section.given]), "highest"):
        found = function(drawn(6, 10, WIDTH), layer)
        # Rows that no axis divides are routed by every device.
        jax.jit(functools.partial(mixed, EXPERTS, jax.nn.silu))(drawn(1, 10, WIDTH), layer)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * float(jnp.abs(other).max()))


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["fsdp=2,expert=2,tensor=2", "fsdp=2,expert=3"])
def test_training_steps_over_an_axis_of_experts_are_those_of_one_device(tmp_path, mesh):
    """A learner's whole program: gradient, clipping, optimizer, and the load that it reports."""
    (tmp_path / CONFIG).write_text(json.dumps(QWEN3_MOE))
    np.save(tmp_path / "train.npy", np.random.default_rng(0).integers(96, size=4_000))
    (one, told), (other, wanted) = steps_on(tmp_path, mesh), steps_on(tmp_path, "fsdp=1")
    assert told.loss == pytest.approx(wanted.loss, rel=1e-6)
    for name, value in wanted.metrics.items():
        assert told.metrics[name] == pytest.approx(value, rel=1e-5)
    for name, leaf in by_name(other).items():
        np.testing.assert_allclose(by_name(one)[name], leaf, atol=2e-5 * np.abs(leaf).max())


def steps_on(folder, mesh):
    """Parameters after three steps, and the outcome of the last."""
    options = {"model": str(folder), "data": str(folder), "length": 16, "batch": 12, "fresh": True}
    document = {
        "run": {"name": "r", "steps": 10}, "store": {"url": "unused"},
        "task": {"build": "diloco.models.decoders:build", "options": options},
        "learner": {"mesh": mesh, "matmul_precision": "highest"},
    }  # fmt: skip
    devices = jax.devices()[: MeshSection.model_validate(mesh).given]
    island = Island(make_config(document, source="test"), "a", devices)
    with island.context():
        params = jax.device_put(jax.jit(island.task.init)(jax.random.key(0)), island.shardings)
        state, step, batches = island.init_state(params), island.inner_step(), island.feed(0)
        for number in range(3):
            counted = np.int32(number), np.uint32(number), island.key()
            params, state, outcome = step(params, state, next(batches), *counted)
    return jax.device_get((params, outcome))


def test_the_load_says_how_unequal_it_is():
    equal = jnp.full((3, 4), 0.25)
    assert float(Load(2 * equal, equal).loss()) == pytest.approx(2.0)
    assert float(Load(2 * equal, equal).busiest()) == pytest.approx(1.0)
    one = jnp.asarray([[1.0, 0.0, 0.0, 0.0]] * 3)
    assert float(Load(one, one).loss()) == pytest.approx(4.0)
    assert float(Load(one, one).busiest()) == pytest.approx(4.0)


def test_a_token_is_multiplied_by_its_experts_alone():
    config = parse_config(QWEN3_MOE, source="")
    dense = parse_config(QWEN3 | {"intermediate_size": 2 * 24}, source="")
    assert multiplied(config) == multiplied(dense) + config.layers * config.width * 6


def test_adapters_stand_beside_attention_while_experts_are_frozen():
    config = parse_config(QWEN3_MOE, source="")
    assert read_lora(LoraOptions(rank=2), config).targets == ("q", "k", "v", "o")
    with pytest.raises(TaskError, match="gate_proj"):
        read_lora(LoraOptions(rank=2, targets=["gate_proj"]), config)


def test_each_expert_is_a_matrix_of_its_own():
    assert matrices("layers/expert_up", (3, 6, 32, 24)).inputs == (2,)


def test_experts_are_dealt_out_and_other_tensors_cut_over_the_same_devices():
    config = parse_config(QWEN3_MOE, source="")
    specs = {
        name: tuple(partition_of(config, None, f"layers/{name}", (3, 6, 32, 24)[:axes]))
        for name, axes in {"expert_up": 4, "router": 3, "q": 3, "mlp_norm": 2}.items()
    }
    assert specs == {
        "expert_up": (None, "expert", "fsdp", "tensor"),
        "router": (None, ("fsdp", "expert"), None),
        "q": (None, ("fsdp", "expert"), "tensor"),
        "mlp_norm": (),
    }


def test_a_mesh_that_does_not_divide_the_experts_is_refused():
    config = parse_config(QWEN3_MOE, source="")
    shapes = {"layers": {"expert_up": jax.ShapeDtypeStruct((3, 6, 32, 24), jnp.float32)}}
    task = SimpleNamespace(partition=functools.partial(partition_of, config, None))
    mesh = make_mesh(MeshSection(expert=4), jax.devices()[:4])
    with pytest.raises(ConfigError, match="expert=4, which does not divide the 6") as caught:
        param_shardings(task, SimpleNamespace(tensors=(), fragments=()), shapes, mesh)
    assert caught.value.hint


# --- Folders


def written(folder, document):
    config, rng = parse_config(document, source=""), np.random.default_rng(0)
    leaves = {
        name: np.float32(0.1) * rng.standard_normal(entry.shape, np.float32)
        for name, entry in table(config).items()
    }
    checkpoint.write_checkpoint(folder, config, leaves)
    return config, tree_of(leaves), leaves


def tree_of(leaves):
    top = {name: values for name, values in leaves.items() if "/" not in name}
    layers = {name[7:]: values for name, values in leaves.items() if name.startswith("layers/")}
    return {**top, "layers": layers}


def fused(folder):
    """The folder's tensors as transformers has them in memory."""
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        place = f"model.layers.{layer}."
        own = {name: tensors.pop(name) for name in [*tensors] if f"{place}block_sparse" in name}
        of = f"{place}block_sparse_moe.experts.{{}}.{{}}.weight"
        gate, up, down = (
            np.stack([own[of.format(number, matrix)] for number in range(5)])
            for matrix in ("w1", "w3", "w2")
        )
        tensors[f"{place}mlp.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        tensors[f"{place}mlp.experts.down_proj"] = down
        tensors[f"{place}mlp.gate.weight"] = own[f"{place}block_sparse_moe.gate.weight"]
    return tensors


def test_experts_in_one_tensor_are_read(tmp_path):
    config, _, leaves = written(tmp_path / "model", MIXTRAL)
    save_file(fused(tmp_path / "model"), tmp_path / "model" / "model.safetensors")
    rows = checkpoint.read_checkpoint(tmp_path / "model", config)
    for name, values in leaves.items():
        np.testing.assert_array_equal(np.asarray(rows[name]), values)
        np.testing.assert_array_equal(rows[name][1:2], values[1:2])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model.layers.0.mlp.gate.weight": np.zeros((5, 32), np.float32)}, "twice"),
        ({"model.layers.0.block_sparse_moe.experts.3.w2.weight": None}, "experts.3.w2"),
        ({"model.layers.0.block_sparse_moe.experts.5.w1.weight": np.zeros(3)}, "experts.5.w1"),
        ({"model.layers.0.mlp.experts.down_proj": np.zeros((4, 32, 48), np.float32)}, "shape"),
    ],
)
def test_experts_that_are_missing_twice_or_of_another_shape_are_named(tmp_path, change, word):
    config, *_ = written(tmp_path / "model", MIXTRAL)
    tensors = load_file(tmp_path / "model" / "model.safetensors") | change
    kept = {name: values for name, values in tensors.items() if values is not None}
    save_file(kept, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=word):
        checkpoint.read_checkpoint(tmp_path / "model", config)


MIXTURE = QWEN3_MOE | {"norm_topk_prob": True, "moe_intermediate_size": 48}


def test_experts_begin_as_the_mlp_of_a_dense_checkpoint(tmp_path):
    dense, params, _ = written(tmp_path / "dense", QWEN3)
    config = parse_config(MIXTURE, source="")
    rows = HuggingFace(config, None, fresh=True).read(tmp_path / "dense")
    made = tree_of({name: np.asarray(each) for name, each in rows.items()})
    router = np.asarray(rows["layers/router"])
    assert 0.015 < router.std() < 0.025
    np.testing.assert_array_equal(rows["layers/router"][1:2], router[1:2])
    assert not np.array_equal(router[0], router[1])
    tokens = np.random.default_rng(0).integers(96, size=(1, 30))
    logits = jax.jit(functools.partial(model.logits_of, compute=PLAIN), static_argnums=0)
    wanted, found = logits(dense, params, tokens), logits(config, made, tokens)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize(
    ("document", "word"),
    [
        (MIXTURE | {"norm_topk_prob": False}, "norm_topk_prob"),
        (MIXTURE | {"moe_intermediate_size": 24}, "width of the MLP"),
        (MIXTURE | {"rope_theta": 1.0}, "rope"),
        (MIXTRAL, "head_width"),
    ],
)
def test_experts_that_cannot_begin_as_the_mlp_are_refused(tmp_path, document, word):
    written(tmp_path / "dense", QWEN3)
    config = parse_config(document, source="")
    with pytest.raises(ConfigError, match=word) as caught:
        HuggingFace(config, None, fresh=True).read(tmp_path / "dense")
    assert caught.value.hint


@pytest.mark.long
def test_some_layers_of_a_mixture_have_an_mlp_in_place_of_experts():
    """Every second layer of the remaining ones has experts: layer 1 alone."""
    given = QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]}
    config = parse_config(given, source="")
    assert config.dense == (0, 2, 3)
    assert parse_config(config_document(config, "float32"), source="") == config
    params = jax.jit(functools.partial(model.init_params, config))(jax.random.key(0))
    assert params["layers"]["mixed"]["router"].shape == (1, 32, 6)
    assert params["layers"]["dense"]["gate"].shape == (3, 32, 48)
    tokens = np.arange(16, dtype=np.int32)[None]
    found = jax.jit(functools.partial(model.forward, config))(params, tokens)
    assert found.load.chosen.shape == (1, 6)
    np.testing.assert_allclose(found.load.chosen.sum(), 2, rtol=1e-6)
    targets = read_lora(LoraOptions(rank=2), config).targets
    assert targets == ("q", "k", "v", "o", "gate", "up", "down")


@pytest.mark.parametrize(
    ("document", "word"),
    [
        (QWEN3_MOE | {"decoder_sparse_step": 4}, "decoder_sparse_step 4 and .* no layer of 3"),
        (QWEN3_MOE | {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers"),
        (QWEN3_MOE | {"mlp_only_layers": 1}, "mlp_only_layers"),
        (QWEN3_MOE | {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        (QWEN3_MOE | {"num_local_experts": 7}, "num_local_experts"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (LLAMA | {"num_local_experts": 4}, "num_local_experts"),
    ],
)
def test_what_no_row_honours_is_refused_by_name(document, word):
    with pytest.raises(ConfigError, match=word) as caught:
        parse_config(document, source="model")
    assert caught.value.hint


def test_the_number_of_experts_has_two_names():
    other = {("num_local_experts" if k == "num_experts" else k): v for k, v in QWEN3_MOE.items()}
    assert parse_config(other, source="") == parse_config(QWEN3_MOE, source="")


def test_a_folder_of_experts_says_them(tmp_path):
    config, *_ = written(tmp_path / "model", QWEN3_MOE)
    document = json.loads((tmp_path / "model" / CONFIG).read_text())
    assert document["num_experts"] == 6
    assert document["norm_topk_prob"] is False
    assert document == config_document(config, "float32")
