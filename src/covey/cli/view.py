"""`covey view`: look at runs in the browser while they train."""

import secrets
import socket
import webbrowser
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import Verb
from covey.errors import ConfigError
from covey.process.addresses import is_loopback, listen, url_of

_FLAGS = (
    Flag(name="runs", help="Folders of runs, or folders that hold runs; runs/ when left out.", type="list[str]", group="data"),
    Flag(name="host", help="Address to listen on; any other than this machine's own needs the token that is printed.", default="127.0.0.1", group="server"),
    Flag(name="port", help="Port to listen on; 0: any free one.", type=int, default=8050, least=0, most=65535, group="server"),
    Flag(name="token", help="Token that every visitor needs; one is generated if the network can reach the page.", group="server"),
    Flag(name="open", help="Open the page in the browser.", type=bool, default=False, group="server"),
)  # fmt: skip
_HEADER_SECONDS = 10.0
"""Time that a browser has to send the headers of a request; the connection of a slower one is closed."""
_SHORTEST_TOKEN = 16


def run(options: dict[str, Any]) -> None:
    """Serve the page until interrupted."""
    folders = [Path(name).expanduser() for name in options["runs"] or ["runs"]]
    _check(options, folders)
    try:
        import uvicorn

        from covey.monitor.view import Library, make_app
        from covey.process.connections import impatient
    except ModuleNotFoundError as error:
        raise ConfigError(f"covey view needs {error.name}; install it with pip install 'covey[view]'.") from error
    token = options["token"] or (None if is_loopback(options["host"]) else secrets.token_urlsafe(24))
    library = Library(folders)
    if not library.find():
        output.say(f"No run yet in {', '.join(map(str, folders))}; one that starts there will appear.")
    listener = listen(options["host"], options["port"])
    address = f"{url_of(options['host'], listener)}/" + (f"?token={token}" if token else "")

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                count = len(library.find())
                output.result(f"{count} {'run' if count == 1 else 'runs'} at {address}  (Ctrl-C ends it)")
                if options["open"]:
                    webbrowser.open(address)

    app, http = make_app(library, token), impatient(_HEADER_SECONDS)
    config = uvicorn.Config(app, http=http, log_level="warning", server_header=False, access_log=False)
    Server(config).run(sockets=[listener])


def _check(options: dict[str, Any], folders: list[Path]) -> None:
    if options["token"] is not None and len(options["token"]) < _SHORTEST_TOKEN:
        raise ConfigError(f"--token is short enough to be guessed; give {_SHORTEST_TOKEN} characters or more.")
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder; give a run's folder, or one that holds runs: covey view runs."
            )


verb = Verb(
    name="view",
    usage="[RUNS...] [options]",
    sentence="A local page with the curves, alerts and completions of runs, live; nothing leaves this machine.",
    flags=lambda: _FLAGS,
    run=run,
    positional=("runs",),
    examples=("covey view runs", "covey view runs/a runs/b --port 0 --open", "covey view runs --host 0.0.0.0"),
)
