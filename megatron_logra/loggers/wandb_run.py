"""Owns the Weights & Biases run. It never asks, never blocks a start for long, and never ends a training run.

Mode: `WANDB_MODE` where it is set; else online with an API key (`WANDB_API_KEY` or an entry of the netrc file for the
server), else offline, to be uploaded later with `wandb sync`. An online start that fails falls back to offline.
The step is a metric of its own, so that a resumed run can log a step again.
"""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_logra.loggers.base import SampleRecord

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_PUBLIC_SERVERS = ("api.wandb.ai", "api.forge.coreweave.com")


class WandbLogger:
    """Logs to the run `name` of `project`, or continues the run `run_id` where one is given.

    `folder` receives wandb's own files, `run_config` is shown beside the run. `run_id` is the identity to store in
    checkpoints, None where wandb could not be started (which is warned about).
    """

    def __init__(
        self,
        *,
        project: str,
        name: str,
        folder: Path,
        run_config: Mapping[str, Any],
        run_id: str | None = None,
    ) -> None:
        self.run_id: str | None = None
        self._run: Any = None
        mode = choose_mode(os.environ)
        for attempt in [mode] if mode != "online" else ["online", "offline"]:
            try:
                self._run = _start_run(attempt, project, name, folder, run_config, run_id)
                self.run_id = self._run.id
                break
            except Exception as error:  # any failure of an optional destination
                _log.warning(
                    "wandb could not be started %s: %s: %s",
                    attempt,
                    type(error).__name__,
                    " ".join(str(error).split()),
                )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step."""
        self._send({"step": step, **metrics})

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Log the samples as a table."""
        if self._run is None:
            return
        try:
            import wandb

            rows = [[step, sample.prompt, sample.response, sample.answer, sample.reward] for sample in samples]
            table = wandb.Table(columns=["step", "prompt", "response", "answer", "reward"], data=rows)
        except Exception as error:  # any failure of an optional destination
            self._stop(error)
        else:
            self._send({"step": step, "samples": table})

    def close(self) -> None:
        """Finish the run (online: wait for the upload)."""
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:  # any failure of an optional destination
                self._stop(error)
        self._run = None

    def _send(self, values: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log(dict(values))
        except Exception as error:  # any failure of an optional destination
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        _log.warning("wandb is off from here on: %s: %s", type(error).__name__, " ".join(str(error).split()))
        self._run = None


def choose_mode(environment: Mapping[str, str]) -> str:
    """Return wandb's mode for these environment variables: see the module's first lines."""
    if environment.get("WANDB_MODE"):
        return environment["WANDB_MODE"]
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    own_server = urlsplit(environment.get("WANDB_BASE_URL", "")).netloc
    servers = (own_server,) if own_server else _PUBLIC_SERVERS
    path = Path(environment.get("NETRC") or "~/.netrc").expanduser()
    try:
        known = netrc.netrc(str(path)).hosts
    except (OSError, netrc.NetrcParseError):
        known = {}
    return "online" if any(server in known for server in servers) else "offline"


def _start_run(
    mode: str, project: str, name: str, folder: Path, run_config: Mapping[str, Any], run_id: str | None
) -> Any:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    # Console capture would take over the streams that the progress line is drawn on.
    settings = wandb.Settings(init_timeout=_START_TIMEOUT_S, console="off", silent=mode != "online")
    run = wandb.init(
        mode=mode,  # type: ignore[arg-type]
        project=project,
        name=name,
        dir=str(folder),
        config=dict(run_config),
        id=run_id,
        resume="allow" if run_id else None,
        settings=settings,
    )
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run
