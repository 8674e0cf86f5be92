"""The options by which `serve` and `chat` open a model, alone or over workers."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from orchestrator.cli.app import Terminal
from orchestrator.errors import ChatTemplateError, InputError
from orchestrator.gateway.template import ChatTemplate, missing_template
from orchestrator.models.architectures import RECIPES
from orchestrator.models.catalog import resolve_model
from orchestrator.models.gguf import GgufFile
from orchestrator.transport.base import parse_address
from orchestrator.types import Contract

# The engine and the workers are imported where they are used: `chat --url` needs neither.
if TYPE_CHECKING:
    from orchestrator.engine.model import Model
    from orchestrator.gateway.backbone import Backbone
    from orchestrator.gateway.drafters.opening import SpeculationSettings
    from orchestrator.gateway.ring_backbone import RingBackbone
    from orchestrator.models.deployment import Deployment

SPECULATION: Final = ("auto", "off", "ngram", "draft", "mtp")
"""The modes of :class:`orchestrator.gateway.drafters.opening.SpeculationMode`, the default first."""

QUIET_SECONDS: Final = 1.0
"""A model that loads within this time needs no progress, and a pipe no lines about it."""


@dataclass(frozen=True, slots=True)
class BackboneOptions:
    """How to open a model; ``local_workers`` are started on this machine, ``addresses`` are there already."""

    local_workers: int
    addresses: tuple[str, ...]
    contract: Contract
    n_ctx: int | None
    threads: int | None
    batch_invariant: bool
    timeout: float
    template_file: Path | None
    speculate: str
    draft_model: str | None
    draft_depth: int | None

    @property
    def has_workers(self) -> bool:
        """Tell whether the experts are computed by other processes."""
        return bool(self.local_workers or self.addresses)

    @property
    def n_threads(self) -> int:
        """Threads of this process: all cores, or half of them where local workers need the others."""
        cores = os.cpu_count() or 1
        return self.threads or max(1, cores // 2 if self.local_workers else cores)

    @property
    def speculation(self) -> SpeculationSettings:
        """What was said about guessing tokens."""
        from orchestrator.gateway.drafters.opening import SpeculationMode, SpeculationSettings
        from orchestrator.gateway.speculation import DEFAULT_DEPTH

        file = None if self.draft_model is None else resolve_model(self.draft_model)
        depth = self.draft_depth or DEFAULT_DEPTH
        return SpeculationSettings(SpeculationMode(self.speculate), file, depth, self.n_threads)

    def template(self, model: Model) -> ChatTemplate | ChatTemplateError:
        """Return the chat template to use, or the error that says why there is none.

        Raises :class:`ChatTemplateError` for a template that is there but broken.
        """
        source = model.chat_template if self.template_file is None else _read(self.template_file)
        if source is None:
            return missing_template()
        bos = model.piece(model.bos, special=True) if model.bos >= 0 else b""
        eos = model.piece(model.eos, special=True) if model.eos >= 0 else b""
        return ChatTemplate(source, bos=bos.decode(errors="replace"), eos=eos.decode(errors="replace"))


_OPTIONS = (
    click.option(
        "--workers",
        type=click.IntRange(1, 64),
        default=None,
        help="Start so many workers here, and again those that end.",
    ),
    click.option(
        "--worker", "addresses", multiple=True, metavar="HOST:PORT", help="Use a running worker; may be repeated."
    ),
    click.option(
        "--contract",
        type=click.Choice([contract.value for contract in Contract]),
        default=Contract.EXACT.value,
        help="What the workers return.",
    ),
    click.option(
        "--ctx", "n_ctx", type=click.IntRange(min=1), default=None, help="Tokens of context. [default: at most 4096]"
    ),
    click.option(
        "--threads", type=click.IntRange(1, 1024), default=None, help="Threads of this process. [default: the cores]"
    ),
    click.option(
        "--no-batch-invariant",
        is_flag=True,
        help="Prefill faster; a token's logits then depend on how the prompt was cut.",
    ),
    click.option("--timeout", type=click.FloatRange(0.1), default=60.0, help="Longest wait for a worker in seconds."),
    click.option(
        "--chat-template",
        "template_file",
        type=click.Path(path_type=Path),
        default=None,
        metavar="FILE",
        help="Use this Jinja template instead of the model's.",
    ),
    click.option(
        "--speculate",
        type=click.Choice(SPECULATION),
        default=SPECULATION[0],
        show_default=True,
        help="Guess tokens ahead: as much as pays, never, from the text, with a draft model or prediction layers.",
    ),
    click.option(
        "--draft-model", default=None, metavar="NAME|FILE", help="A small model of the same vocabulary that guesses."
    ),
    click.option(
        "--draft-depth",
        type=click.IntRange(1, 62),
        default=None,
        help="Tokens guessed at once, at most. [default: 8]",
    ),
)


def backbone_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets them as one argument ``options``."""

    @functools.wraps(function)
    def gather(
        *args: Any,
        workers: int | None,
        addresses: tuple[str, ...],
        contract: str,
        n_ctx: int | None,
        threads: int | None,
        no_batch_invariant: bool,
        timeout: float,
        template_file: Path | None,
        speculate: str,
        draft_model: str | None,
        draft_depth: int | None,
        **others: Any,
    ) -> None:
        if workers and addresses:
            raise click.UsageError("--workers starts workers here, --worker names running ones: use one of them")
        if draft_model is None and speculate == "draft":
            raise click.UsageError("--speculate draft needs a --draft-model")
        if draft_model is not None and speculate in ("off", "ngram", "mtp"):
            raise click.UsageError(f"--speculate {speculate} uses no --draft-model")
        options = BackboneOptions(
            local_workers=workers or 0,
            addresses=tuple(str(parse_address(address)) for address in addresses),
            contract=Contract(contract),
            n_ctx=n_ctx,
            threads=threads,
            batch_invariant=not no_batch_invariant,
            timeout=timeout,
            template_file=template_file,
            speculate=speculate,
            draft_model=draft_model,
            draft_depth=draft_depth,
        )
        function(*args, options=options, **others)

    command: Callable[..., None] = gather
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def start_workers(terminal: Terminal, stack: ExitStack, path: Path, options: BackboneOptions) -> tuple[str, ...]:
    """Start the local workers for as long as the stack is open; return the addresses of all workers to use."""
    if not options.local_workers:
        return options.addresses
    from orchestrator.workers.local import LocalWorkers

    with terminal.progress("workers"):
        workers = stack.enter_context(LocalWorkers(path, options.local_workers))
    workers.keep(terminal.error)
    return workers.addresses


def open_model(
    terminal: Terminal, path: Path, addresses: Sequence[str], options: BackboneOptions, *, slots: int | None = 1
) -> Backbone:
    """Load the model, without its experts where there are workers; the caller closes it."""
    from orchestrator.gateway.backbone import open_backbone

    _require_one_token_at_a_time(path)
    begin = time.monotonic()
    with terminal.progress("model") as progress:

        def show(share: float) -> None:
            if time.monotonic() - begin > QUIET_SECONDS:
                progress(share, 1.0)

        return open_backbone(
            path,
            addresses,
            contract=options.contract,
            n_ctx=options.n_ctx,
            n_sequences=slots,
            n_threads=options.n_threads,
            batch_invariant=options.batch_invariant,
            timeout=options.timeout,
            progress=show,
        )


def _require_one_token_at_a_time(path: Path) -> None:
    """Raise :class:`InputError` for a model that fills in a whole text at once, as diffusion models do."""
    architecture = GgufFile.open(path).architecture
    recipe = RECIPES.get(architecture)
    if recipe is not None and recipe.bidirectional and not recipe.embeds:
        raise InputError(
            f"{path.name} fills in a whole text at once ({architecture}, a diffusion model), and answers here are "
            "made token by token",
            hint="`linkcpp onboard` compares such a model; what generates with it is not built",
        )


def deployed_options(deployment: Deployment, options: BackboneOptions, slots: int | None) -> BackboneOptions:
    """Take from a deployment what it says; raise :class:`click.UsageError` where an option says otherwise."""
    said = {
        "--workers": bool(options.local_workers),
        "--worker": bool(options.addresses),
        "--ctx": options.n_ctx is not None,
        "--slots": slots is not None,
        "--no-batch-invariant": not options.batch_invariant,
    }
    if deployment.stages:
        said["--contract"] = options.contract is not Contract.EXACT
    given = next((name for name, is_given in said.items() if is_given), None)
    if given is not None:
        raise click.UsageError(f"{given} is for the deployment to say: leave it out")
    return replace(
        options,
        addresses=tuple(worker.address for worker in deployment.workers_of("")),
        n_ctx=deployment.context,
        threads=options.threads or deployment.gateway.threads,
    )


def deployed_file(terminal: Terminal, deployment: Deployment) -> Path:
    """Return the file that the gateway of a deployment needs: the model's, or what it holds of one on a server."""
    from orchestrator.cli.stage_file import stage_file, tokenizer_file
    from orchestrator.ring.layout import LayerRange

    ranges = [LayerRange(first, last) for first, last in deployment.gateway.layers]
    if not deployment.stages:
        return resolve_model(deployment.model)
    if not ranges:
        return tokenizer_file(terminal, deployment.model)
    return stage_file(terminal, deployment.model, ranges, without_experts=bool(deployment.workers_of("")))


def open_stages(terminal: Terminal, path: Path, deployment: Deployment, options: BackboneOptions) -> RingBackbone:
    """Open the ring of a deployment; the caller closes it."""
    from orchestrator.gateway.ring_backbone import open_ring

    _require_one_token_at_a_time(path)
    with terminal.progress("stages"):
        return open_ring(path, deployment, n_threads=options.n_threads, timeout=options.timeout)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read the chat template {path}: {reason}") from error
