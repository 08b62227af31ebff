"""The command `baton cluster`: a Ray cluster as the planner's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import Commands, Json
from baton.console import err, out, print_json

cluster_app = typer.Typer(cls=Commands, no_args_is_help=True, help="What a cluster consists of, for baton plan.")


@cluster_app.callback()
def _cluster() -> None:
    """A group of commands, though it holds one."""


@cluster_app.command("describe")
def describe(
    ray: Annotated[str, typer.Option("--ray", metavar="ADDRESS", help="HOST:PORT of the cluster's head, or auto.")],
    write_to: Annotated[
        Path | None, typer.Option("--out", help="Write the cluster TOML there instead of printing it.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option("--base", help="Cluster TOML whose links, prices and GPU types hold.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What plans call the cluster.")] = "ray",
    with_cpus: Annotated[
        bool, typer.Option("--with-cpus", help="Machines without a GPU too, where others have one: a core is a device.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write down the machines of a Ray cluster as the file that `baton plan --cluster` reads.

    GPU types come from Ray (accelerator_type:H100) or from custom resources gpu_type_NAME; a machine whose type is not
    known is left out and named. Bandwidths Ray does not know: what is assumed is said.
    """
    from baton.cluster.inventory import as_toml
    from baton.cluster.ray.describe import describe_ray
    from baton.files import write_whole

    described = describe_ray(ray, base=base, name=name, with_cpus=with_cpus)
    text = as_toml(described)
    if write_to is not None:
        write_whole(write_to, text.encode())
    for note in described.notes:
        err.print(note, soft_wrap=True)
    if as_json:
        content = described.settings.model_dump(exclude_none=True, exclude_defaults=True)
        print_json({**content, "notes": described.notes})
    elif write_to is not None:
        out.print(f"written: {write_to}", soft_wrap=True)
    else:
        out.print(text, end="", soft_wrap=True)
