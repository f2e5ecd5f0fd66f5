"""`rlkit proxy`: several vLLM servers as one, until stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlkit.errors import BadInput
from rlkit.run_name import recipe_of


def proxy(
    replicas: Annotated[list[str], typer.Option("--replica", metavar="URL", help="A vLLM server; repeatable.")],
    recipe_file: Annotated[
        Path | None, typer.Option("--recipe", help="Or a run: takes routing, transport and max_loras from it.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change one field; repeatable.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8000,
    token_env: Annotated[str | None, typer.Option(help="The variable with the token the replicas want.")] = None,
    incoming_token_env: Annotated[
        str | None, typer.Option(help="The one with the token to ask clients for; needed beyond this machine.")
    ] = None,
    adapter_root: Annotated[
        Path | None, typer.Option(help="Load adapters from inside it only; needed beyond this machine.")
    ] = None,
    receivers: Annotated[
        list[str] | None,
        typer.Option("--receiver", metavar="URL", help="Takes pushed adapters beside a replica, in their order."),
    ] = None,
    receiver_token_env: Annotated[
        str | None, typer.Option(help="The variable with the token the receivers want.")
    ] = None,
    stats_file: Annotated[Path | None, typer.Option(help="Where to write the counters as JSON.")] = None,
) -> None:
    """Serve several vLLM servers as one, with every adapter on each, until stopped.

    Completions go to the server that has the prompt in its cache; pause and resume reach all servers. Counters: GET
    /proxy/stats (JSON) and /metrics (its own and every replica's).

    Example: rlkit proxy --replica http://a:8000 --replica http://b:8000 --port 8080
    """
    from rlkit.recipe import TransportSection, load_recipe
    from rlkit.serving.proxy import log_to_stderr, run
    from rlkit.serving.proxy_config import parse_proxy_config

    settings: dict[str, Any] = {"replicas": replicas, "host": host, "port": port, "exit_with_parent": False}
    settings |= {"token_env": token_env, "incoming_token_env": incoming_token_env, "adapter_root": adapter_root}
    settings |= {"receivers": receivers or [], "receiver_token_env": receiver_token_env, "stats_file": stats_file}
    if stats_file is not None and not stats_file.absolute().parent.is_dir():
        raise BadInput(f"--stats-file {stats_file}: there is no folder {stats_file.absolute().parent}")
    if recipe_file is not None:
        file, _ = recipe_of(recipe_file)
        recipe = load_recipe(file, overrides or [])
        settings |= {"routing": recipe.routing, "transport": recipe.transport, "max_loras": recipe.serve.max_loras}
    elif overrides:
        raise BadInput(f"--set {overrides[0]}: changes a recipe, give one with --recipe")
    elif receivers:
        settings["transport"] = TransportSection(kind="push")
    config = parse_proxy_config(settings, "proxy")
    log_to_stderr()
    run(config)
