"""The recipes of CONTRIBUTING.md, followed in a copy of the tree: three files at most, and it works.

A test edits only files that its recipe names, no two of them by the same step.
"""

import fnmatch
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import spoiled

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
# Put together, since a page of this name is nowhere.
RUNBOOK = "small-rounds" + ".md"
COPIED = ("aggregator", "common", "diloco", "docs", "infra", "learner", "runbooks")


def files_of(title: str) -> list[str]:
    """The file that each step of a recipe names first."""
    body = re.search(rf"^### {title}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert body, f"CONTRIBUTING.md has no recipe {title!r}"
    steps = re.findall(r"^\d\. (.*?)(?=^\d\. |^\n)", body[1], re.MULTILINE | re.DOTALL)
    return [re.findall(r"`([\w/<>]+/[\w.<>-]+\.(?:py|md))`", step)[0] for step in steps]


class Tree:
    """A copy of the production folders, which a recipe may change.

    Args:
        root: an empty folder.
        title: of the recipe.
    """

    def __init__(self, root: Path, title: str) -> None:
        self._root, self._named, self._edited = root, files_of(title), dict[str, str]()
        assert 1 <= len(self._named) <= 3
        for name in COPIED:
            leave = shutil.ignore_patterns("__pycache__", ".terraform")
            shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=leave)
        # The reference has a table that is made of what tests do.
        (root / "tests").symlink_to(ROOT / "tests")

    def write(self, path: str, text: str) -> None:
        """Make a file."""
        self._note(path)
        assert not (self._root / path).exists()
        (self._root / path).parent.mkdir(exist_ok=True)
        (self._root / path).write_text(textwrap.dedent(text))

    def edit(self, path: str, *changes: tuple[str, str]) -> None:
        """Replace what stands once in a file, again and again."""
        self._note(path)
        text = (self._root / path).read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{path} has {text.count(old)} of {old!r}"
            text = text.replace(old, new)
        (self._root / path).write_text(text)

    def before(self, path: str, place: str, text: str) -> None:
        """Put lines before a place in a file, as far to the right."""
        margin = place[: len(place) - len(place.lstrip())]
        self.edit(path, (place, textwrap.indent(textwrap.dedent(text), margin) + place))

    def run(self, *arguments: str) -> str:
        """The output of Python within the tree."""
        done = subprocess.run(
            [sys.executable, *arguments], check=False, cwd=self._root, capture_output=True, text=True,
            env={"PYTHONPATH": str(self._root), "JAX_PLATFORMS": "cpu", "COLUMNS": "200",
                 "HOME": str(self._root), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def script(self, code: str) -> str:
        """The output of a script within the tree, of which it imports."""
        begin = f"import diloco; assert diloco.__file__.startswith({str(self._root)!r})\n"
        return self.run("-c", begin + textwrap.dedent(code))

    def _note(self, path: str) -> None:
        """Count a file; at most one may stand for a name with `<name>` in it."""
        named = [name.replace("<name>", "*") for name in self._named]
        found = [name for name in named if name == path] or [
            name for name in named if fnmatch.fnmatchcase(path, name)
        ]
        assert found, f"the recipe does not name {path}"
        assert self._edited.setdefault(found[0], path) == path, f"{path} is one too many"


def test_each_recipe_is_followed_here() -> None:
    titles = re.findall(r"^### (.+)", PAGE, re.MULTILINE)
    assert [f"test_{title.lower().replace(' ', '_')}" in globals() for title in titles] == [
        True
    ] * 6


@pytest.mark.long
def test_a_codec(tmp_path: Path) -> None:
    """tern: eight codes -1, 0 or 1 in 16 bits, and scales that are absmax."""
    tree = Tree(tmp_path, "A codec")
    tree.edit(
        "common/protocol/codecs.py",
        ('"int8", "int4", "int2"]', '"int8", "int4", "int2", "tern"]'),
        (
            "FORMS: Final[dict[Codec, Form]] = {\n",
            (
                "FORMS: Final[dict[Codec, Form]] = {\n"
                '    "tern": Form(6, np.dtype(np.int16), "eight each", "absmax", greatest=1, elements=8),\n'
            ),
        ),
        (
            "    values_Bxb = codes.reshape(-1, block)",
            (
                '    if codec == "tern":\n'
                "        items_Bxi = codes.reshape(-1, block // 8)\n"
                "        parts = [(items_Bxi >> (2 * k)) & 3 for k in range(8)]\n"
                "        codes = np.concatenate(parts, axis=1).astype(np.int8) - np.int8(2)\n"
                "    values_Bxb = codes.reshape(-1, block)"
            ),
        ),
        (
            "        elif codec in GREATEST_CODE:\n",
            (
                '        elif codec == "tern":\n'
                "            bad = any((chunk >> (2 * k) & 3).min() == 0 for k in range(8))\n"
                "        elif codec in GREATEST_CODE:\n"
            ),
        ),
    )
    tree.edit(
        "learner/tensors/quantize_and_pack.py",
        (
            "    return codes.astype(jnp.float32) * jnp.asarray(encoded.scales)",
            (
                '    if codec == "tern":\n'
                "        parts = [(codes >> (2 * k)) & 3 for k in range(8)]\n"
                "        codes = jnp.concatenate(parts, axis=-1).astype(jnp.int32) - 2\n"
                "    return codes.astype(jnp.float32) * jnp.asarray(encoded.scales)"
            ),
        ),
        (
            '"int2": _codes_int2}',
            '"int2": _codes_int2, "tern": _codes_tern}',
        ),
        (
            "def _round_int4(",
            (
                "def _codes_tern(quotients: jax.Array) -> jax.Array:\n"
                "    finite = jnp.where(jnp.isnan(quotients), 0.0, jnp.clip(quotients, -1, 1))\n"
                "    codes = (jnp.rint(finite) + 2).astype(jnp.int16)\n"
                "    parts = enumerate(jnp.split(codes, 8, axis=-1))\n"
                "    return sum(part << (2 * k) for k, part in parts)\n\n\n"
                "def _round_int4("
            ),
        ),
    )
    kernels = "aggregator/arrays/codec_kernels.py"
    tree.before(kernels, "# --- int8\n", '''
        def _square_tern(
            elements: Lanes, scales: Bits, codes: Any, b: Any, squares_b: Any
        ) -> None:
            whole = i32(0)
            for j in range(len(elements) // 8):
                for k in range(8):
                    code = i32((codes[b, j] >> i32(2 * k)) & i32(3)) - i32(2)
                    whole += i32(code * code)
            squares_b[0] += _scaled(whole, scales[b])


        def _add_tern(
            elements: Lanes, scales: Bits, codes: Any, b: Any, factor: Any, total_b: Vector
        ) -> None:
            step, items = _step(scales[b], factor), len(elements) // 8
            for j in range(items):
                for k in range(8):
                    code = i32((codes[b, j] >> i32(2 * k)) & i32(3)) - i32(2)
                    total_b[k * items + j] += f32(code) * step


        def _encode_tern(
            elements: Lanes, scales: Bits, codes: Any, first: Any, count: Any, values_Kxb: Vector
        ) -> None:
            items = len(elements) // 8
            for k in range(count):
                b = first + k
                scales[b] = _scale_bits(elements, values_Kxb[k], f32(1))
                scale = _wide(scales[b])
                if scales[b] == _NAN_SCALE:
                    codes[b] = 0
                    values_Kxb[k] = scale
                    continue
                inverse = f32(1) / scale
                for j in range(items):
                    item = u32(0)
                    for i in range(8):
                        code = _rounded(values_Kxb[k, i * items + j], inverse, f32(1))
                        item |= i32(i32(i32(code) + i32(2)) << i32(2 * i))
                        values_Kxb[k, i * items + j] = code * scale
                    codes[b, j] = i16(item)


    ''')  # fmt: skip
    tree.edit(
        kernels,
        (
            "OPERATIONS: Final = {\n",
            'OPERATIONS: Final = {\n    "int16": Operations(_square_tern, _add_tern, _encode_tern),\n',
        ),
    )
    tree.script(
        """
        import ml_dtypes
        import numpy as np
        from diloco.aggregator.arrays.grid import Grid
        from diloco.aggregator.arrays.merge import Accumulator, segment_norms
        from diloco.aggregator.arrays.outer import close_round, make_outer
        from diloco.common.process.config import SyncSection
        from diloco.common.protocol import shards
        from diloco.common.protocol.codecs import Encoded, aligned_zeros, decode_numpy
        from diloco.learner.tensors.quantize_and_pack import decode_blocks, encode

        codec = SyncSection(codec="tern").codec
        block, blocks = 32, 40
        size = block * blocks
        values = np.random.default_rng(0).standard_normal(size).astype(np.float32)

        data = shards.pack(codec, encode(codec, values, block), block)
        assert len(data) == shards.HEADER.size + 2 * blocks + size // 4
        read = shards.unpack(data, codec=codec, count=size, block=block)
        decoded = decode_numpy(codec, read, block)
        rows = Encoded(read.scales, read.codes.reshape(blocks, -1))
        assert decoded.tobytes() == np.asarray(decode_blocks(codec, rows, block)).tobytes()
        scales = read.scales.astype(np.float32).repeat(block)
        assert np.abs(decoded - values).max() > 0
        assert (np.abs(decoded - values) <= 0.51 * scales).all()

        grid = Grid(size=size, block=block, ranges=((0, size),), lengths=np.array([blocks]),
                    radial=np.zeros(1, np.bool_))
        norm, = segment_norms(grid, codec, [read])
        np.testing.assert_allclose(norm, np.linalg.norm(decoded.astype(np.float64)))
        total = Accumulator(grid)
        for _ in range(3):
            total.add(codec, [read], np.full(1, 2, ml_dtypes.bfloat16))
        np.testing.assert_allclose(total.total(), 6 * decoded, rtol=1e-6)
        theta, view = aligned_zeros(size), aligned_zeros(size)
        theta += values
        total.reset()
        delta = close_round(
            grid, total, np.ones(1, np.float32), theta_N=theta, view_N=view, state={},
            optimizer=make_outer("sgd"), learning_rate=1.0, momentum=0.0, delta_codec=codec,
        )
        assert shards.pack(codec, delta, block) == data
        assert view.tobytes() == decoded.tobytes()
        """
    )
    shown = tree.script("from docs.generate import messages; print(messages.codecs())")
    assert "| 6 | `tern` | eight each | absmax |" in shown


def test_a_store(tmp_path: Path) -> None:
    """mem://: objects in this process's memory."""
    tree = Tree(tmp_path, "A store")
    tree.write(
        "common/storage/store/shared.py",
        '''
        """Objects in memory that whoever names the same bucket sees."""

        from diloco.common.storage.store.memory import MemoryStore
        from diloco.common.storage.store.protocol import split_url

        STORES: dict[str, MemoryStore] = {}


        def open_shared(url: str) -> MemoryStore:
            """The store of a bucket's name."""
            return STORES.setdefault(split_url(url)[0], MemoryStore())
        ''',
    )
    opening = "common/storage/store/opening.py"
    tree.edit(
        opening,
        ('    "gs": _open_gcs,\n', '    "gs": _open_gcs,\n    "mem": _open_shared,\n'),
    )
    tree.before(opening, "# For each URL scheme", '''
        def _open_shared(url: str, _: bool, __: bool) -> ObjectStore:
            from diloco.common.storage.store.shared import open_shared

            return open_shared(url)


    ''')  # fmt: skip
    tree.before("docs/stores.md", "| a path, ", "| `mem://name` | this process's memory | none |\n")
    hint = tree.script(
        """
        from diloco.common.process.config.daemon import StoreSection
        from diloco.common.protocol.errors import ConfigError, ObjectExistsError
        from diloco.common.storage.store import open_store

        url = StoreSection(url="mem://lab").url
        open_store(url).put("a/b", b"12345")
        assert open_store(url).get("a/b") == b"12345"
        assert open_store(url).get_range("a/b", 1, 3) == b"23"
        assert [one.name for one in open_store(url).list("a/")] == ["a/b"]
        try:
            open_store(url).put("a/b", b"6")
        except ObjectExistsError:
            pass
        else:
            raise SystemExit("an object was changed")
        try:
            open_store("nfs://lab")
        except ConfigError as error:
            print(error.hint)
        """
    )
    assert "mem://" in hint


def test_a_setting(tmp_path: Path) -> None:
    """How many deadlines a fragment may stand still before that is an error."""
    tree = Tree(tmp_path, "A setting")
    tree.before(
        "common/process/config/run.py",
        "    liveness_timeout_s: Seconds = Field(\n",
        '    patience: Seconds = Field(default=3.0, description="deadlines until a fragment stalls")\n',
    )
    tree.edit(
        "diloco/run/health_findings.py",
        (
            "PATIENCE * settings.quorum.deadline_s",
            "settings.quorum.patience * settings.quorum.deadline_s",
        ),
    )
    tree.script(
        """
        import tomllib
        from diloco.common.process.config import RunSettings
        from diloco.run.health_findings import patience_s

        def patience(more):
            file = '[run]\\nname = "lab"\\nsteps = 9\\n[quorum]\\ndeadline_s = 10\\n' + more
            return patience_s(RunSettings.model_validate(tomllib.loads(file)))

        assert patience("patience = 5") == patience("") + 20
        """
    )
    made = tree.script("from docs.generate import configuration as made; print(made.blocks())")
    assert "| `patience` | number > 0 | `3.0` | deadlines until a fragment stalls |" in made


def test_a_finding(tmp_path: Path) -> None:
    """Rounds of one update each."""
    run = spoiled.make_run(tmp_path / "run", "", versions=2)
    tree = Tree(tmp_path / "tree", "A finding")
    findings = "diloco/run/health_findings.py"
    tree.before(findings, "    yield from _quiet(run, settings)\n", "    yield from _lonely(run)\n")
    tree.before(findings, "def _quiet(", '''
        def _lonely(run: RunStatus) -> Iterator[Finding]:
            """Rounds that hold less than there are learners."""
            if run.round_size < 100:
                yield Finding(
                    severity="warning",
                    about="rounds",
                    sentence=f"they hold {run.round_size:.1f} updates each",
                    advice="see who is late",
                    runbook="runbooks/RUNBOOK",
                )


    '''.replace("RUNBOOK", RUNBOOK))  # fmt: skip
    tree.write(f"runbooks/{RUNBOOK}", "# Rounds are small\n")
    tree.before("runbooks/README.md", "- clocks differ:", f"- small rounds: [small]({RUNBOOK})\n")
    shown = tree.run("-m", "diloco", "--store", str(run.store), "status", str(run.tape), "--once")
    assert "updates each" in shown
    assert RUNBOOK in shown


def test_a_command(tmp_path: Path) -> None:
    """`diloco weather`, of a room of its own."""
    tree = Tree(tmp_path, "A command")
    tree.write(
        "diloco/weather/command.py",
        '''
        """`diloco weather`."""

        from diloco.run.cli.command import command, group

        app = group()


        @command(app)
        def weather() -> None:
            """Say what the weather is."""
            from diloco.weather.run import weather_of

            print(weather_of("here"))
        ''',
    )
    tree.write(
        "diloco/weather/run.py", 'def weather_of(place: str) -> str:\n    return f"fair {place}"\n'
    )
    tree.edit(
        "diloco/program.py",
        (
            "from diloco.run.cli.help import",
            "from diloco.weather.command import app as weather\nfrom diloco.run.cli.help import",
        ),
        ('"plan", "watch",', '"plan", "weather", "watch",'),
        ("model, replay, auth, provision,\n", "model, replay, auth, provision, weather,\n"),
    )
    shown = tree.run("-m", "diloco", "--help")
    assert re.search(r"  plan .*\n  weather +Say what the weather is\.\n  watch ", shown)
    assert tree.run("-m", "diloco", "weather") == "fair here\n"


@pytest.mark.long
def test_a_model_family(tmp_path: Path) -> None:
    """Llama, of whose layers each adds a part of what it computes."""
    tree = Tree(tmp_path, "A model family")
    tree.edit(
        "diloco/models/decoders/families.py",
        ('    "llama",\n', '    "granite",\n    "llama",\n'),
        (
            "FAMILY_FILES: dict[Family, FamilyFiles] = {\n",
            (
                "FAMILY_FILES: dict[Family, FamilyFiles] = {\n"
                '    "granite": FamilyFiles(\n'
                '        title="Granite",\n'
                '        architecture="GraniteForCausalLM",\n'
                '        defaults={"hidden_act": "silu"},\n'
                '        honoured=frozenset({"residual_multiplier"}),\n'
                '        must_be={"mlp_bias": (False,)},\n'
                "    ),\n"
            ),
        ),
    )
    tree.edit(
        "diloco/models/decoders/config.py",
        ("    positions: int = 0\n", "    positions: int = 0\n    residual: float = 1.0\n"),
        (
            "            rope=rope,\n",
            '            rope=rope,\n            residual=self._number("residual_multiplier", 1.0),\n',
        ),
        (
            '        "attention_bias": "o" in config.biased,\n',
            (
                '        "attention_bias": "o" in config.biased,\n'
                '        "residual_multiplier": config.residual,\n'
            ),
        ),
    )
    tree.edit(
        "diloco/models/decoders/model.py",
        (
            "constrain(x_BxLxD + output_BxLxD, ROWS)\n    output_BxLxD",
            "constrain(x_BxLxD + config.residual * output_BxLxD, ROWS)\n    output_BxLxD",
        ),
        (
            "constrain(x_BxLxD + output_BxLxD, ROWS)\n    if config.fed_width",
            "constrain(x_BxLxD + config.residual * output_BxLxD, ROWS)\n    if config.fed_width",
        ),
    )
    tree.script(
        """
        import jax
        import numpy as np
        from diloco.models.decoders.config import config_document, parse_config
        from diloco.models.decoders.model import hidden_of, init_params

        LLAMA = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
                 "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}

        def hidden(**more):
            config = parse_config(LLAMA | more, source="a test")
            again = parse_config(config_document(config, "float32"), source="a test")
            assert again == config
            params = jax.jit(lambda: init_params(config, jax.random.key(0)))()
            function = jax.jit(lambda params: hidden_of(config, params, np.arange(8)[None]))
            return np.asarray(function(params))

        same = hidden(model_type="granite")
        np.testing.assert_array_equal(same, hidden())
        assert not np.array_equal(hidden(model_type="granite", residual_multiplier=0.5), same)
        """
    )
