"""A stand-in Terraform provider: real schema, no cloud.

Serves the Terraform plugin protocol (version 6) from a schema file with the shape of
``terraform providers schema -json``. Terraform itself then checks attribute names, types, required
attributes and block counts, plans, and runs ``terraform test``. Nothing is ever created: "apply"
fills every unknown with a made-up value.

Terraform starts it, where `install.py` put it. What it does not know: which changes replace a resource,
defaults, patterns of names, most conflicts between attributes, and all that Google's API would answer. So a
pass means "the provider would parse this", not "this can be applied".
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import gzip
import json
import os
import re
import sys
import tempfile
import threading
from concurrent import futures
from pathlib import Path

import grpc
import msgpack
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# ------------------------------------------------------------------------------ wire messages
# Only names of services and numbers of fields matter on the wire. One line per message:
# field name, number, type; "*" marks a repeated field, "%" a map from string.
_MESSAGES = {
    "Empty": "",
    "Step": "attribute_name 1 string",
    "Path": "*steps 1 Step",
    "Diag": "severity 1 int32, summary 2 string, detail 3 string, attribute 4 Path",
    "Value": "msgpack 1 bytes, json 2 bytes",
    "RawState": "json 1 bytes",
    "Attr": "name 1 string, type 2 bytes, description 3 string, required 4 bool, optional 5 bool, "
    "computed 6 bool, sensitive 7 bool, deprecated 9 bool, write_only 11 bool",
    "Nested": "type_name 1 string, block 2 Block, nesting 3 int32, min_items 4 int64, max_items 5 int64",
    "Block": "version 1 int64, *attributes 2 Attr, *block_types 3 Nested",
    "Schema": "version 1 int64, block 2 Block",
    "Caps": "plan_destroy 1 bool, get_provider_schema_optional 2 bool",
    "SchemaReply": "provider 1 Schema, %resource_schemas 2 Schema, %data_source_schemas 3 Schema, "
    "*diagnostics 4 Diag, server_capabilities 6 Caps",
    "ProviderConfig": "config 1 Value",
    "ConfigureAsk": "terraform_version 1 string, config 2 Value",
    "ProviderConfigReply": "*diagnostics 2 Diag",
    "TypedConfig": "type_name 1 string, config 2 Value",
    "Diags": "*diagnostics 1 Diag",
    "UpgradeAsk": "type_name 1 string, version 2 int64, raw_state 3 RawState",
    "UpgradeReply": "state 1 Value, *diagnostics 2 Diag",
    "ReadAsk": "type_name 1 string, current_state 2 Value, private 3 bytes",
    "ReadReply": "state 1 Value, *diagnostics 2 Diag, private 3 bytes",
    "PlanAsk": "type_name 1 string, prior_state 2 Value, proposed_new_state 3 Value, config 4 Value",
    "PlanReply": "state 1 Value, *requires_replace 2 Path, private 3 bytes, *diagnostics 4 Diag, "
    "legacy_type_system 5 bool",
    "ApplyAsk": "type_name 1 string, prior_state 2 Value, planned_state 3 Value, config 4 Value",
    "ApplyReply": "state 1 Value, private 2 bytes, *diagnostics 3 Diag, legacy_type_system 4 bool",
    "ImportAsk": "type_name 1 string, id 2 string",
    "Imported": "type_name 1 string, state 2 Value, private 3 bytes",
    "ImportReply": "*imported 1 Imported, *diagnostics 2 Diag",
    "DataReply": "state 1 Value, *diagnostics 2 Diag",
    "StopReply": "error 1 string",
}


def _build_messages() -> dict:
    kinds = {"string": 9, "bytes": 12, "bool": 8, "int32": 5, "int64": 3}
    pkg = "standin"
    fd = descriptor_pb2.FileDescriptorProto(name="standin.proto", package=pkg, syntax="proto3")
    for name, spec in _MESSAGES.items():
        m = fd.message_type.add(name=name)
        for part in filter(None, (p.strip() for p in spec.split(","))):
            field, number, kind = part.split()
            f = m.field.add(name=field.lstrip("*%"), number=int(number))
            f.label = 3 if field[0] in "*%" else 1
            if field[0] == "%":
                entry = "".join(w.title() for w in f.name.split("_")) + "Entry"
                e = m.nested_type.add(name=entry)
                e.options.map_entry = True
                e.field.add(name="key", number=1, type=9, label=1)
                e.field.add(name="value", number=2, type=11, label=1, type_name=f".{pkg}.{kind}")
                f.type, f.type_name = 11, f".{pkg}.{name}.{entry}"
            elif kind in kinds:
                f.type = kinds[kind]
            else:
                f.type, f.type_name = 11, f".{pkg}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(fd)
    return {
        n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{pkg}.{n}"))
        for n in _MESSAGES
    }


PB = _build_messages()
NESTING = {"single": 1, "list": 2, "set": 3, "map": 4, "group": 5}


# ------------------------------------------------------------------------------ values
class Unknown:
    """A value that is known only after apply."""


UNKNOWN = Unknown()


def decode(value):
    if not value.msgpack:
        return json.loads(value.json) if value.json else None
    return msgpack.unpackb(
        value.msgpack, raw=False, strict_map_key=False, ext_hook=lambda c, d: UNKNOWN
    )


def encode(value):
    return PB["Value"](
        msgpack=msgpack.packb(value, default=lambda v: msgpack.ExtType(0, b""), use_bin_type=True)
    )


def is_unknown(v):
    return isinstance(v, Unknown)


# ------------------------------------------------------------------------------ schema
class Schema:
    def __init__(self, path: Path):
        raw = path.read_bytes()
        doc = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        ((self.source, body),) = doc["provider_schemas"].items()
        self.provider = body["provider"]["block"]
        self.resources = {k: v["block"] for k, v in body.get("resource_schemas", {}).items()}
        self.data = {k: v["block"] for k, v in body.get("data_source_schemas", {}).items()}

    def reply(self):
        out = PB["SchemaReply"](
            provider=self._schema(self.provider),
            server_capabilities=PB["Caps"](get_provider_schema_optional=True),
        )
        for name, block in self.resources.items():
            out.resource_schemas[name].CopyFrom(self._schema(block))
        for name, block in self.data.items():
            out.data_source_schemas[name].CopyFrom(self._schema(block))
        return out

    def _schema(self, block):
        return PB["Schema"](version=0, block=self._block(block))

    def _block(self, block):
        out = PB["Block"]()
        for name, a in sorted(block.get("attributes", {}).items()):
            out.attributes.add(
                name=name,
                type=json.dumps(a["type"]).encode(),
                required=bool(a.get("required")),
                optional=bool(a.get("optional")),
                computed=bool(a.get("computed")),
                sensitive=bool(a.get("sensitive")),
                deprecated=bool(a.get("deprecated")),
                write_only=bool(a.get("write_only")),
            )
        for name, n in sorted(block.get("block_types", {}).items()):
            out.block_types.add(
                type_name=name,
                block=self._block(n["block"]),
                nesting=NESTING[n["nesting_mode"]],
                min_items=n.get("min_items", 0),
                max_items=n.get("max_items", 0),
            )
        return out


def each_nested(nested, value):
    """The objects in the value of a nested block."""
    if value is None or is_unknown(value):
        return []
    if nested["nesting_mode"] in ("single", "group"):
        return [value]
    return list(value.values()) if isinstance(value, dict) else list(value)


# ------------------------------------------------------------------------------ checks of a config
_ONE_OF = re.compile(r"Possible values: \[([^\]]*)\]")

# What the schema can't say: (type, kind, arguments). "conflict": at most one may be set;
# "one": exactly one must be.
RULES = [
    ("google_tpu_v2_vm", "conflict", ("accelerator_type", "accelerator_config")),
    ("google_tpu_v2_vm", "conflict", ("network_config", "network_configs")),
    ("google_secret_manager_secret_version", "one", ("secret_data", "secret_data_wo")),
    ("google_compute_firewall", "one", ("allow", "deny")),
]


def allowed_values(attribute):
    m = _ONE_OF.search(attribute.get("description", ""))
    return json.loads("[" + m.group(1) + "]") if m else None


def check_values(block, value, path=()):
    """Read-only attributes that were set, and values outside the closed lists of the documentation."""
    for name, a in block.get("attributes", {}).items():
        v = (value or {}).get(name)
        if v is None:
            continue
        if not a.get("optional") and not a.get("required"):
            yield (*path, name), "is decided by the provider and can't be set"
            continue
        allowed = allowed_values(a)
        if not allowed or is_unknown(v):
            continue
        for item in v if isinstance(v, list) else [v]:
            if isinstance(item, str) and item != "" and item not in allowed:
                yield (*path, name), f"{item!r} is not one of {', '.join(map(repr, allowed))}"
    for name, n in block.get("block_types", {}).items():
        for item in each_nested(n, (value or {}).get(name)):
            yield from check_values(n["block"], item, (*path, name))


def check_rules(type_name, value):
    for kind_of, rule, names in RULES:
        if kind_of != type_name:
            continue
        given = [n for n in names if is_unknown(value.get(n)) or value.get(n) not in (None, [])]
        unsure = any(is_unknown(value.get(n)) for n in names)
        if len(given) > 1 and not unsure:
            yield (given[1],), f"can't be set together with {given[0]}"
        if rule == "one" and not given:
            yield (names[0],), "one of " + ", ".join(names) + " must be set"


# ------------------------------------------------------------------------------ plan and apply
def plan(block, value, new=True):
    """Drop write-only values; in a new object, mark what only the provider can know."""
    if value is None or is_unknown(value):
        return value
    out = dict(value)
    for name, a in block.get("attributes", {}).items():
        if a.get("write_only"):
            out[name] = None
        elif new and a.get("computed") and out.get(name) is None:
            out[name] = UNKNOWN
    for name, n in block.get("block_types", {}).items():
        v = out.get(name)
        if v is None or is_unknown(v):
            continue
        if n["nesting_mode"] in ("single", "group"):
            out[name] = plan(n["block"], v, new)
        elif isinstance(v, dict):
            out[name] = {k: plan(n["block"], i, new) for k, i in v.items()}
        else:
            out[name] = [plan(n["block"], i, new) for i in v]
    return out


def made_up(kind, where):
    if kind == "string":
        return f"stand-in-{where}"
    if kind == "number":
        return 0
    if kind == "bool":
        return False
    if isinstance(kind, list) and kind[0] in ("list", "set"):
        item = kind[1]
        return [made_up(item, where)] if isinstance(item, list) and item[0] == "object" else []
    if isinstance(kind, list) and kind[0] == "map":
        return {}
    if isinstance(kind, list) and kind[0] == "object":
        return {k: made_up(t, k) for k, t in kind[1].items()}
    return None


def settle(block, value, type_name):
    """Replace what is unknown by something made up, as an apply would by something real."""
    if value is None:
        return None
    out = dict(value)
    for name, a in block.get("attributes", {}).items():
        v = out.get(name)
        if a.get("write_only"):
            out[name] = None
        elif is_unknown(v):
            out[name] = made_up(a["type"], f"{type_name}-{name}".replace("_", "-"))
    for name, n in block.get("block_types", {}).items():
        v = out.get(name)
        if is_unknown(v):
            out[name] = []
        elif n["nesting_mode"] in ("single", "group"):
            out[name] = settle(n["block"], v, type_name)
        elif isinstance(v, dict):
            out[name] = {k: settle(n["block"], i, type_name) for k, i in v.items()}
        elif v is not None:
            out[name] = [settle(n["block"], i, type_name) for i in v]
    return out


# ------------------------------------------------------------------------------ the service
class Provider:
    def __init__(self, schema: Schema):
        self.schema = schema
        self.stopped = threading.Event()

    def methods(self):
        """method name -> (request message, handler); every handler returns a reply message."""
        return {
            "GetProviderSchema": ("Empty", lambda r: self.schema.reply()),
            "ValidateProviderConfig": ("ProviderConfig", lambda r: PB["ProviderConfigReply"]()),
            "ConfigureProvider": ("ConfigureAsk", lambda r: PB["Diags"]()),
            "ValidateResourceConfig": (
                "TypedConfig",
                lambda r: self.validate(self.schema.resources, r),
            ),
            "ValidateDataResourceConfig": (
                "TypedConfig",
                lambda r: self.validate(self.schema.data, r),
            ),
            "UpgradeResourceState": ("UpgradeAsk", self.upgrade),
            "ReadResource": (
                "ReadAsk",
                lambda r: PB["ReadReply"](state=r.current_state, private=r.private),
            ),
            "PlanResourceChange": ("PlanAsk", self.plan),
            "ApplyResourceChange": ("ApplyAsk", self.apply),
            "ImportResourceState": ("ImportAsk", self.import_),
            "ReadDataSource": ("TypedConfig", self.read_data),
            "StopProvider": ("Empty", lambda r: PB["StopReply"]()),
        }

    def validate(self, blocks, r):
        out = PB["Diags"]()
        value = decode(r.config)
        for path, problem in (
            *check_values(blocks[r.type_name], value),
            *check_rules(r.type_name, value),
        ):
            d = out.diagnostics.add(
                severity=1, summary="Invalid value", detail=f"{'.'.join(path)}: {problem}"
            )
            d.attribute.steps.add(attribute_name=path[0])
        return out

    def upgrade(self, r):
        return PB["UpgradeReply"](state=encode(json.loads(r.raw_state.json)))

    def plan(self, r):
        new, prior = decode(r.proposed_new_state), decode(r.prior_state)
        if new is not None:  # null is proposed for a destroy
            new = plan(self.schema.resources[r.type_name], new, new=prior is None)
        return PB["PlanReply"](state=encode(new), legacy_type_system=True)

    def apply(self, r):
        state = settle(self.schema.resources[r.type_name], decode(r.planned_state), r.type_name)
        return PB["ApplyReply"](state=encode(state), legacy_type_system=True)

    def import_(self, r):
        block = self.schema.resources[r.type_name]
        state = dict.fromkeys((*block.get("attributes", {}), *block.get("block_types", {})))
        for k, n in block.get("block_types", {}).items():
            state[k] = None if n["nesting_mode"] in ("single", "group") else []
        state["id"] = r.id
        out = PB["ImportReply"]()
        out.imported.add(type_name=r.type_name, state=encode(state))
        return out

    def read_data(self, r):
        block = self.schema.data[r.type_name]
        return PB["DataReply"](
            state=encode(settle(block, plan(block, decode(r.config)), r.type_name))
        )


def handlers(service, methods):
    table = {}
    for name, (request, handle) in methods.items():
        table[name] = grpc.unary_unary_rpc_method_handler(
            lambda r, ctx, h=handle: h(r),
            request_deserializer=PB[request].FromString,
            response_serializer=lambda m: m.SerializeToString(),
        )
    return grpc.method_handlers_generic_handler(service, table)


def self_signed():
    """A certificate for this run only: Terraform asks for TLS even on a local socket."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(minutes=5))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    pem = cert.public_bytes(serialization.Encoding.PEM)
    der = cert.public_bytes(serialization.Encoding.DER)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem, der, private


def serve(provider: Provider, reattach: bool = False) -> None:
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=8),
        options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)],
    )

    def shutdown(_):
        provider.stopped.set()
        return PB["Empty"]()

    server.add_generic_rpc_handlers(
        (
            handlers("tfplugin6.Provider", provider.methods()),
            handlers("plugin.GRPCController", {"Shutdown": ("Empty", shutdown)}),
        )
    )
    with tempfile.TemporaryDirectory(prefix="standin-") as tmp:
        sock = f"{tmp}/s"
        if reattach:
            server.add_insecure_port(f"unix:{sock}")
            server.start()
            address = {"Network": "unix", "String": sock}
            entry = {
                "Protocol": "grpc",
                "ProtocolVersion": 6,
                "Pid": os.getpid(),
                "Test": True,
                "Addr": address,
            }
            print(
                "TF_REATTACH_PROVIDERS=" + json.dumps({provider.schema.source: entry}), flush=True
            )
        else:
            pem, der, key = self_signed()
            server.add_secure_port(f"unix:{sock}", grpc.ssl_server_credentials([(key, pem)]))
            server.start()
            cert = base64.b64encode(der).decode().rstrip("=")
            print(f"1|6|unix|{sock}|grpc|{cert}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            provider.stopped.wait()
        server.stop(0.2).wait()


def main(argv: list[str]) -> int:
    here = Path(__file__).resolve().parent
    paths = [a for a in argv if not a.startswith("-")]
    schema = Path(paths[0]) if paths else here / "schema.json.gz"
    if "TF_PLUGIN_MAGIC_COOKIE" not in os.environ and "--reattach" not in argv:
        print("This program is started by Terraform; see README.md.", file=sys.stderr)
        return 1
    serve(Provider(Schema(schema)), reattach="--reattach" in argv)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
