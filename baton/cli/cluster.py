"""The command group `baton cluster`: describe a Ray cluster in a file for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import Commands, Json, print_written
from baton.console import err, out, print_json

cluster_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Describe a cluster for `baton plan`.")


@cluster_app.callback()
def _cluster() -> None:
    """Make `cluster` a group: without a callback, typer would turn its only command into `baton cluster` itself."""


@cluster_app.command("describe")
def describe(
    ray: Annotated[str, typer.Option("--ray", metavar="ADDRESS", help="Address of the Ray head: HOST:PORT or auto.")],
    write_to: Annotated[
        Path | None, typer.Option("--out", help="Write the cluster TOML to this file instead of printing it.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option("--base", help="Cluster TOML to take links, prices and GPU types from.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the cluster in plans.")] = "ray",
    with_cpus: Annotated[
        bool, typer.Option("--with-cpus", help="Include machines without a GPU; each core counts as a device.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Describe the machines of a Ray cluster in a file for `baton plan --cluster`.

    GPU types are taken from Ray (accelerator_type:H100) or from custom resources gpu_type_NAME. Machines of unknown
    type are not included; a message names them. Ray does not report bandwidths, so assumed values are used and
    printed.
    """
    from baton.cluster.inventory import as_toml
    from baton.cluster.ray.connection import describe_ray
    from baton.files import write_whole

    described = describe_ray(ray, base=base, name=name, with_cpus=with_cpus)
    text = as_toml(described)
    if write_to is not None:
        write_whole(write_to, text.encode())
    for note in described.notes:
        err.print(note)
    if as_json:
        content = described.settings.model_dump(exclude_none=True, exclude_defaults=True)
        print_json({**content, "notes": described.notes})
    elif write_to is not None:
        print_written(write_to)
    else:
        out.print(text, end="")
