"""Writes the results of transformers on tiny checkpoints; the default suite compares with them.

    python tests/models/make_expected.py expected OUT.npz [CASE ...]  # samples of every case
    python tests/models/make_expected.py checkpoints FOLDER [CASE ...]  # of every case, and all
    python tests/models/make_expected.py logits FOLDER OUT.npz [ADAPTER]  # of a folder of ours
    python tests/models/make_expected.py adapter FOLDER OUT TARGET ...  # peft's own; OUT/logits.npz
    python tests/models/make_expected.py exported FOLDER ...  # of each; FOLDER/logits.npz
    python tests/models/make_expected.py generate FOLDER      # greedily; FOLDER/generated.npz
    python tests/models/make_expected.py images FOLDER        # of text with images; FOLDER/images.npz

It runs in an environment that has torch and transformers, and nothing of the project.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from cases import CASES, WHOLE
from drawn import REFUSED, drawn
from transformers import AutoConfig, AutoModelForCausalLM
from weights import GENERATED, PROMPT, ROWS, STRIDE, parts, pictured, tokens, weight

# Experts one by one, in any dtype; a dense model takes no notice.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def expected(out: str, *cases: str) -> None:
    found = {}
    for case, document in CASES.items():
        if cases and case not in cases:
            continue
        with tempfile.TemporaryDirectory() as folder:
            logits, loss, gradient = measured(case, made(case, document, Path(folder)))
        found[f"{case}/logits"] = logits[0, ::ROWS]
        found[f"{case}/loss"] = loss
        ordered = [values for _, values in sorted(gradient.items())]
        found[f"{case}/gradient"] = np.concatenate([each.reshape(-1)[::STRIDE] for each in ordered])
        found[f"{case}/largest"] = np.stack([np.abs(each).max() for each in ordered])
    np.savez_compressed(out, **found)


def checkpoints(folder: str, *cases: str) -> None:
    for case, document in (CASES | drawn() | WHOLE).items():
        if case in REFUSED or (cases and case not in cases):
            continue
        place = Path(folder) / case
        model = made(case, document, place)
        model.save_pretrained(place, max_shard_size="40KB")
        if "moe" in case or "mixtral" in case:
            model.save_pretrained(place / "fused", save_original_format=False)
        logits, loss, gradient = measured(case, model)
        named = {f"gradient/{name}": values for name, values in gradient.items()}
        np.savez(place / "expected.npz", logits=logits, loss=loss, **named)


def logits(folder: str, out: str, adapter: str | None = None) -> None:
    """In float64, as `measured`."""
    model = AutoModelForCausalLM.from_pretrained(folder, **EAGER).float().eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    model = model.double()
    seen = torch.from_numpy(tokens("any", vocab(model))).long()
    with torch.no_grad(), in_double():
        np.savez(out, logits=_single(model(seen).logits))


def adapter(folder: str, out: str, *targets: str) -> None:
    """An adapter of modules, and of parameters of experts, whose matrices are all drawn."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(folder, **EAGER).float().eval()
    # As suffixes of names; a vision tower has modules of the same names, which peft cannot adapt.
    parameters = [name for name in targets if name.startswith("experts.")]
    modules = [name for name in targets if not name.startswith("experts.")]
    if model.config.model_type == "gemma4":
        modules = rf".*language_model.*({'|'.join(modules)})"
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=modules, target_parameters=parameters or None,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, values in adapted.named_parameters():
            if "lora_" in name:
                values.copy_(torch.from_numpy(weight("adapter", name, tuple(values.shape))))
    adapted.save_pretrained(out)
    logits(folder, f"{out}/logits.npz", out)


def exported(*folders: str) -> None:
    for folder in folders:
        logits(folder, str(Path(folder) / "logits.npz"))


def generate(folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, **EAGER).float().eval()
    prompt = torch.from_numpy(tokens("any", vocab(model))[:, :PROMPT]).long()
    model.generation_config.eos_token_id = None
    told = model.generate(prompt, do_sample=False, max_new_tokens=GENERATED)
    np.savez(Path(folder) / "generated.npz", tokens=told.numpy())


def images(folder: str) -> None:
    """Logits, loss on text and gradients, in float64; and tokens that follow, greedily."""
    model = AutoModelForCausalLM.from_pretrained(folder, **EAGER).double().eval()
    vision, image = model.config.vision_config, model.config.image_token_id
    row = pictured(vision.patch_size, vision.pooling_kernel_size, image)
    given = {name: torch.from_numpy(values) for name, values in row.items()}
    seen = given["input_ids"][0]
    with in_double():
        shown = (given["pixel_values"], given["image_position_ids"])
        features = torch.cat(model.model.get_image_features(*shown).pooler_output)
        logits = model(**given).logits
        told = torch.where(seen == image, -100, seen)[1:]
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], told, ignore_index=-100)
        gradient = _gradient(Path(folder).name, model, loss)
    model.generation_config.eos_token_id = None
    more = model.float().generate(**given, do_sample=False, max_new_tokens=GENERATED)
    np.savez(
        Path(folder) / "images.npz",
        logits=_single(logits),
        features=_single(features),
        loss=_single(loss),
        generated=more.numpy(),
        **{f"gradient/{name}": values for name, values in gradient.items()},
    )


@contextlib.contextmanager
def in_double():
    """Lets `Tensor.float` give float64.

    Norms of transformers are float32 in any dtype: rounding alone is 2e-5 of some gradients, and
    more of 30 layers' logits.
    """
    single, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = single


def made(case: str, document: dict, folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document))
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, **EAGER).float().eval()
    with torch.no_grad():
        for name, values in stored(model).items():
            for foreign, place in parts(case, name, tuple(values.shape)):
                part = values[place]
                part.copy_(torch.from_numpy(weight(case, foreign, tuple(part.shape))))
    return model


def vocab(model) -> int:
    return model.config.get_text_config().vocab_size


def stored(model) -> dict:
    """Parameters, and the buffers that its files have."""
    buffers = {name: each for name, each in model.named_buffers() if name in model.state_dict()}
    return dict(model.named_parameters()) | buffers


def measured(case: str, model) -> tuple:
    """In float64, as far as transformers lets it: what differs from it is our rounding alone."""
    model = model.double()
    seen = torch.from_numpy(tokens(case, vocab(model))).long()
    with in_double():
        told = model(seen)
        logits = told.logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], seen[0, 1:])
        if getattr(told, "aux_loss", None) is not None:
            loss = loss + model.router_aux_loss_coef * told.aux_loss
        return _single(logits), _single(loss), _gradient(case, model, loss)


def _gradient(case: str, model, loss: torch.Tensor) -> dict:
    loss.backward()
    return {
        foreign: _single((torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)[place])
        for name, leaf in stored(model).items()
        for foreign, place in parts(case, name, tuple(leaf.shape))
    }


def _single(values: torch.Tensor) -> np.ndarray:
    return values.detach().to(torch.float32).numpy()


if __name__ == "__main__":
    commands = (expected, checkpoints, logits, adapter, exported, generate, images)
    known = {one.__name__: one for one in commands}
    known[sys.argv[1]](*sys.argv[2:])
