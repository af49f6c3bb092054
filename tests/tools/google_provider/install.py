"""Set up the stand-in providers in a directory of your choice.

    python install.py DEST [--add PACKAGE ...] [--version V] [--schema FILE ...]

Fetches prebuilt CDK-for-Terraform bindings from npm, rebuilds the provider schemas from them, and
lays out DEST/mirror (a Terraform filesystem mirror) and DEST/terraform.rc (a CLI config that uses
it). Needs node, npm, and a Python (3.11 or newer) with grpcio, protobuf, msgpack and cryptography:
the Python that runs this script is the one the providers will run on.

--add PACKAGE   one more binding, e.g. @cdktf/provider-random@12.0.1
--schema FILE   a dump of `terraform providers schema -json` of one provider; it replaces the binding
                of the same provider. Its version is taken from --version.
--version V     claim this version for every provider, where a configuration asks for a newer one
                than the bindings know. The schema stays the old one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BINDINGS = ["@cdktf/provider-google@16.12.1", "@cdktf/provider-google-beta@16.12.1"]

# What the bindings do not tell: which attributes hold secrets.
SENSITIVE = {
    "resource_schemas": {
        "google_secret_manager_secret_version": ["secret_data", "secret_data_wo"],
        "google_secret_manager_regional_secret_version": ["secret_data", "secret_data_wo"],
        "google_service_account_key": ["private_key"],
        "google_storage_hmac_key": ["secret"],
        "random_password": ["result", "bcrypt_hash"],
        "tls_private_key": ["private_key_pem", "private_key_openssh", "private_key_pem_pkcs8"],
    },
    "data_source_schemas": {
        "google_secret_manager_secret_version": ["secret_data"],
        "google_secret_manager_secret_version_access": ["secret_data"],
        "google_service_account_access_token": ["access_token"],
        "google_client_config": ["access_token"],
    },
}


def schema_of_binding(spec: str, work: Path) -> dict:
    done = subprocess.run(
        ["npm", "pack", "--silent", spec],
        cwd=work,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    archive = work / done.stdout.decode().split()[-1]
    target = work / archive.stem
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if m.name.endswith((".js", "package.json"))]
        tar.extractall(target, members=members, filter="data")
    made = subprocess.run(
        ["node", str(HERE / "extract_schema.js"), str(target / "package")],
        check=True,
        stdout=subprocess.PIPE,
    )
    shutil.rmtree(target)
    return json.loads(made.stdout)


def mark_sensitive(schema: dict) -> None:
    (body,) = schema["provider_schemas"].values()
    for kind, table in SENSITIVE.items():
        for name, attributes in table.items():
            known = body.get(kind, {}).get(name, {"block": {}})["block"].get("attributes", {})
            for a in attributes:
                if a in known:
                    known[a]["sensitive"] = True


def target_platform() -> str:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return f"{platform.system().lower()}_{machine}"


# Of provider 7.39, which no binding has: blocks of a resource, by its type.
NEWER = {
    "google_compute_instance_group_manager": {
        "target_size_policy": {
            "nesting_mode": "list",
            "max_items": 1,
            "block": {
                "attributes": {
                    "mode": {
                        "type": "string",
                        "optional": True,
                        "description": 'Possible values: ["INDIVIDUAL", "BULK"]',
                    }
                }
            },
        }
    }
}


def add_newer(schema: dict) -> None:
    """Add what a later provider has, in place."""
    ((_, body),) = schema["provider_schemas"].items()
    for kind, blocks in NEWER.items():
        if kind in body["resource_schemas"]:
            body["resource_schemas"][kind]["block"].setdefault("block_types", {}).update(blocks)


def main() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("dest", type=Path)
    ap.add_argument("--add", action="append", default=[], metavar="PACKAGE")
    ap.add_argument("--version")
    ap.add_argument("--schema", action="append", default=[], type=Path, metavar="FILE")
    args = ap.parse_args()
    dest = args.dest.resolve()
    schemas: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as tmp:
        for spec in [*BINDINGS, *args.add]:
            schema = schema_of_binding(spec, Path(tmp))
            schemas[next(iter(schema["provider_schemas"]))] = schema
    for file in args.schema:
        schema = json.loads(file.read_text())
        schemas[next(iter(schema["provider_schemas"]))] = schema

    mirror = dest / "mirror"
    shutil.rmtree(mirror, ignore_errors=True)
    for source, schema in schemas.items():
        mark_sensitive(schema)
        add_newer(schema)
        version = args.version or schema.get("provider_version", "0.0.0")
        home = mirror / source / version / target_platform()
        home.mkdir(parents=True)
        with gzip.GzipFile(home / "schema.json.gz", "wb", mtime=0) as f:
            f.write(json.dumps(schema, sort_keys=True).encode())
        program = home / f"terraform-provider-{source.rsplit('/', 1)[1]}_v{version}"
        program.write_text(f"#!{sys.executable}\n" + (HERE / "standin_provider.py").read_text())
        program.chmod(0o755)
        print(f"{source} {version}")
    listed = ", ".join(json.dumps(s) for s in schemas)
    (dest / "terraform.rc").write_text(
        "disable_checkpoint = true\n"
        "provider_installation {\n"
        f"  filesystem_mirror {{\n    path    = {json.dumps(str(mirror))}\n    include = [{listed}]\n  }}\n"
        f"  direct {{\n    exclude = [{listed}]\n  }}\n"
        "}\n"
    )
    print(f"\nexport TF_CLI_CONFIG_FILE={dest / 'terraform.rc'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
