"""The ``monograph`` command: chat, generate, bench, plan, tune, warm, doctor.

Exit status: 0; 1 for a fault that is said in one line on stderr; 2 for wrong usage; 130 after Ctrl-C. PyTorch is
imported only once a command runs, so that help and usage errors come at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from monograph.chat.terminal import INTERRUPTED, LoadLine, complain, converse, printable, show, show_stats
from monograph.errors import ConfigError, MonographError, PromptError

if TYPE_CHECKING:
    from monograph.model.chat import Chat
    from monograph.model.engine import Engine
    from monograph.model.generate import Completion
    from monograph.model.plan import Plan
    from monograph.model.prepare import Prepared
    from monograph.model.sampling import Sampling
    from monograph.model.tune import TuneProgress

DTYPES = ("auto", "bfloat16", "float16", "float32")
SHORT_DTYPES = ("bf16", "fp16", "fp32")
LOAD_OPTIONS = ("revision", "device", "dtype", "max_seq_len", "token", "local_files_only")
FILE_NAMES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "divisor of the scores; 0 is greedy"),
    "top_k": (int, "keep the K best tokens; 0 keeps all"),
    "top_p": (float, "keep the best tokens up to this much probability; 1 keeps all"),
    "min_p": (float, "keep tokens this probable relative to the best; 0 keeps all"),
    "repetition_penalty": (float, "weaken every token seen so far; 1 is off"),
    "presence_penalty": (float, "weaken tokens of the answer, once each; 0 is off"),
    "frequency_penalty": (float, "weaken tokens of the answer, once for each use; 0 is off"),
    "seed": (int, "draw the same answer again"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments; those of the process when None.

    Returns:
        The exit status.
    """
    try:
        with _plain_output():
            try:
                return _run(argv)
            finally:
                sys.stdout.flush()  # here, where a reader that has gone is dealt with, and not at interpreter exit
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has had enough, as `| head -1` has: nothing to complain of, and nothing more to write.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                os.dup2(nowhere, stream.fileno())
        return 0


def _run(argv: Sequence[str] | None) -> int:
    args = make_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except MonographError as error:
        complain(_in_flags(str(error)))
        return 1


def _in_flags(message: str) -> str:
    """A message in the words of the command line: "pass max_seq_len=64" becomes "pass --max-seq-len 64"."""
    return re.sub(
        rf"\b({'|'.join((*LOAD_OPTIONS, 'on_full'))})=(['\"]?)([\w:.-]*)\2",
        lambda match: f"--{match[1].replace('_', '-')} {match[3]}".strip(),
        message,
    )


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; its help is part of the README."""
    parser = _Parser(
        prog="monograph",
        usage="monograph COMMAND ...",
        description="Run a Llama-architecture language model, one stream at a time.",
        epilog="'monograph COMMAND --help' tells more.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    chat = commands.add_parser(
        "chat",
        prog="monograph chat",
        help="talk with a model",
        usage="monograph chat MODEL [options]",
        description="Talk with a model. Ctrl-C ends an answer, Ctrl-D leaves, /help lists what else can be typed. "
        "Standard input that is no terminal is one message, answered once.",
    )
    _add_model(chat)
    chat.add_argument("--system", type=_text, metavar="TEXT", help="system message")
    _names_a_file(
        chat.add_argument("--load", metavar="FILE", help="go on with a conversation that was saved"),
        chat.add_argument("--save", metavar="FILE", help="save the conversation at the end"),
    )
    chat.add_argument(
        "--on-full",
        choices=("length", "trim"),
        default="length",
        metavar="WHAT",
        help="when max_seq_len is reached: length ends, trim drops the oldest turns (the default: length)",
    )
    _add_answer_options(chat)
    _add_load_options(chat)
    chat.set_defaults(command=_chat)

    generate = commands.add_parser(
        "generate",
        prog="monograph generate",
        help="answer one prompt",
        usage="monograph generate MODEL PROMPT [options]",
        description="Answer one prompt. A model with a chat template gets the prompt as a user message.",
        epilog="Control characters are left out of plain text; --json has the text as it is.",
    )
    _add_model(generate)
    prompt = generate.add_argument(
        "prompt", metavar="PROMPT", type=_text, help="the prompt; '-' reads it from standard input"
    )
    _names_a_file(prompt)
    generate.add_argument("--file", action="store_true", help="PROMPT names a file that holds the prompt")
    generate.add_argument("--system", type=_text, metavar="TEXT", help="system message")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    generate.add_argument("--json", action="store_true", help="print text, tokens, finish reason and stats as JSON")
    _add_answer_options(generate)
    _add_load_options(generate)
    generate.set_defaults(command=_generate)

    bench = commands.add_parser(
        "bench",
        prog="monograph bench",
        help="measure how fast a model answers here",
        usage="monograph bench MODEL [options]",
        description="Measure tokens a second, time a token, bytes read a second and time to the first token; on a GPU "
        "beside the most that it can read, measured first. A verdict says whether that is as it should be.",
    )
    _add_model(bench)
    bench.add_argument("--prompt-tokens", type=_count, metavar="N", help="tokens of each prompt (512, where they fit)")
    bench.add_argument("--new-tokens", type=_count, metavar="N", help="tokens of each answer (128, where they fit)")
    bench.add_argument(
        "--seconds", type=_seconds, default=10.0, metavar="X", help="how long to measure, about (the default: 10)"
    )
    bench.add_argument("--json", action="store_true", help="print the figures as JSON")
    _add_load_options(bench)
    bench.set_defaults(command=_bench)

    plan = commands.add_parser(
        "plan",
        prog="monograph plan",
        help="show what a model needs before loading it",
        usage="monograph plan MODEL [options]",
        description="Show the memory map of a model, what it needs and what is free, without loading weights.",
    )
    _add_model(plan)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    svg = plan.add_argument("--svg", metavar="FILE", help="draw the memory map, to scale, into a file for browsers")
    _names_a_file(svg)
    _add_load_options(plan)
    plan.set_defaults(command=_plan)

    tune = commands.add_parser(
        "tune",
        prog="monograph tune",
        help="look for faster block sizes on a GPU",
        usage="monograph tune MODEL [options]",
        description="Look for block sizes with which the decode step of a model is faster on this GPU, timed as it "
        "runs, and keep them on disk. Every later load of the same shape, dtype and GPU takes them from there.",
        epilog="The outcome holds for every --max-seq-len; with 16402 or more all lengths are timed: 64, 1,024 and "
        "16,384. It is kept in ~/.cache/monograph/tiles, or under the folder that MONOGRAPH_CACHE_DIR names; remove "
        "the file to go back to the defaults.",
    )
    _add_model(tune)
    tune.add_argument(
        "--seconds", type=_seconds, default=30.0, metavar="X", help="how long to look, at most (the default: 30)"
    )
    _add_load_options(tune)
    tune.set_defaults(command=_tune)

    warm = commands.add_parser(
        "warm",
        prog="monograph warm",
        help="compile ahead what a model needs on a GPU",
        usage="monograph warm MODEL [options]",
        description="Compile every kernel that a model needs on this GPU and keep them on disk, so that the next start "
        "compiles nothing. Weights are neither loaded nor fetched.",
        epilog="Give the options that the model will be loaded with: kernels differ by dtype, and between lengths that "
        "16 divides and others. They are kept in ~/.triton/cache, or the folder that TRITON_CACHE_DIR names.",
    )
    _add_model(warm)
    _add_load_options(warm)
    warm.set_defaults(command=_warm)

    doctor = commands.add_parser(
        "doctor",
        prog="monograph doctor",
        help="see what this machine has and lacks",
        usage="monograph doctor [options]",
        description="Look at what monograph needs of this machine: Python, PyTorch, GPU, driver, compiler, caches, "
        "libraries. Each is ok, warn or fail, with the way out. The network is not asked.",
        epilog="The exit status is 0 if monograph can run here, on a GPU or on the CPU, and 1 if it cannot.",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument(
        "model", metavar="MODEL", help="Hugging Face repo (org/name, org/name:file.gguf), folder, or .gguf file"
    )
    _names_a_file(model)


def _names_a_file(*actions: argparse.Action) -> None:
    """Let shells complete arguments as file names, in the scripts that shtab makes from the parser."""
    for action in actions:
        setattr(action, "complete", FILE_NAMES)  # noqa: B010  # an attribute that argparse does not know


def _add_answer_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answer", "What is not given here comes from the model's generation_config.json.")
    group.add_argument("--max-new-tokens", type=_count, metavar="N", help="end the answer after N tokens")
    group.add_argument(
        "--stop", type=_text, action="append", default=[], metavar="TEXT", help="end the answer before TEXT; repeatable"
    )
    for name, (kind, text) in SAMPLING_FLAGS.items():
        metavar = {float: "X", int: "N"}[kind] if name != "top_k" else "K"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    group.add_argument("--stats", action="store_true", help="say on standard error what the answer took")


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loading")
    group.add_argument(
        "--max-seq-len", type=_count, metavar="N", help="tokens of prompt and answer to reserve memory for"
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES + SHORT_DTYPES,
        default="auto",
        metavar="TYPE",
        help=f"{', '.join(DTYPES)} (the default: auto)",
    )
    group.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 (the default: auto)")
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face repo")
    group.add_argument("--token", help="Hugging Face token; better kept in the variable HF_TOKEN")
    group.add_argument("--local-files-only", action="store_true", help="use what has been downloaded; no network")


def _chat(args: argparse.Namespace) -> int:
    from monograph.chat.commands import Prompt, check_place, save

    if args.load is not None and args.system is not None:
        _usage_error("--system begins a conversation, and --load goes on with one that has begun")
    if args.save is not None:
        check_place(args.save)
    message = None if sys.stdin is not None and sys.stdin.isatty() else _read_stdin()
    options = {**_answer_options(args), "sampling": _sampling(args)}
    with _load(args) as engine:
        if engine.tokenizer.chat_template is None:
            raise PromptError("this model has no chat template; 'monograph generate' continues a prompt without one")

        def load(path: str) -> Chat:
            loaded = engine.load_chat(path)
            loaded.on_full = args.on_full
            return loaded

        chat = engine.chat(args.system, on_full=args.on_full) if args.load is None else load(args.load)
        prompt = Prompt(chat, options, load)
        status = 0
        try:
            if message is None:
                status = converse(prompt, stats=args.stats)
            else:
                with contextlib.closing(chat.send(message, **options)) as pieces:
                    show(pieces)
                if args.stats and chat.completion is not None:
                    show_stats(chat.completion.stats)
        except (KeyboardInterrupt, BrokenPipeError):  # what was said until then stays in the conversation
            if args.save is not None:
                save(prompt.chat, args.save)
            raise
        if args.save is not None:
            save(prompt.chat, args.save)
    return status


def _generate(args: argparse.Namespace) -> int:
    if args.raw and args.system is not None:
        _usage_error("--system is part of the chat template, which --raw leaves out")
    if args.prompt == "-":
        prompt = _read_stdin()
    else:
        prompt = _read_file(args.prompt) if args.file else args.prompt
    options = {**_answer_options(args), "sampling": _sampling(args)}
    with _load(args) as engine:
        stream = engine.stream(_prompt_ids(engine, prompt, args), **options)
        with contextlib.closing(stream):
            if args.json:
                for _ in stream:
                    pass
                print(_to_json(stream.completion))
            else:
                show(chunk.text for chunk in stream)
        if args.stats:
            show_stats(stream.completion.stats)
    return 0


def _bench(args: argparse.Namespace) -> int:
    from monograph.model.bench_model import bench_model

    sizes = {name: getattr(args, name) for name in ("prompt_tokens", "new_tokens", "seconds")}
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(LoadLine()) if sys.stderr is not None and sys.stderr.isatty() else None
        found = bench_model(args.model, **_load_options(args), **sizes, progress=line, loaded=stack.close)
    print(found.to_json() if args.json else found)
    return 0


def _plan(args: argparse.Namespace) -> int:
    import monograph

    plan = monograph.plan_model(args.model, **_load_options(args))
    if args.svg is not None:
        _draw(plan, args)
    print(plan.to_json() if args.json else plan)
    return 0


def _draw(plan: Plan, args: argparse.Namespace) -> None:
    from monograph.model.plan_picture import plan_picture
    from monograph.model.whole_file import write_whole

    name = args.model.rstrip("/").rpartition("/")[2] if os.path.exists(args.model) else args.model  # noqa: PTH110
    try:
        write_whole(args.svg, plan_picture(plan, name or args.model))
    except OSError as error:
        raise ConfigError(f"{args.svg}: the picture cannot be written: {error.strerror or error}") from error


def _tune(args: argparse.Namespace) -> int:
    from monograph.model.tune_model import tune_model

    with contextlib.ExitStack() as stack:
        line = stack.enter_context(LoadLine()) if sys.stderr is not None and sys.stderr.isatty() else None
        lines = _TuneLines()

        def say(progress: TuneProgress) -> None:
            stack.close()  # the load is done: wipe its line
            lines(progress)

        options = {**_load_options(args), "seconds": args.seconds}
        tuned = tune_model(args.model, **options, progress=line, report=say)
    if tuned is None:
        where = "no CUDA device here, and on a CPU" if args.device == "auto" else "on a CPU"
        print(f"nothing to tune: {where} PyTorch runs the program, and there are no block sizes to choose")
    else:
        print(tuned)
    return 0


def _warm(args: argparse.Namespace) -> int:
    from monograph.model.warm import warm_model

    def say(kernel: Prepared, number: int, count: int) -> None:
        took = f"{kernel.seconds:.1f} s" if kernel.compiled else "in the cache"
        print(f"kernel {number} of {count}: {kernel.name}, {took}", flush=True)

    warmed = warm_model(args.model, **_load_options(args), report=say)
    if warmed is None:
        where = "no CUDA device here, and on a CPU" if args.device == "auto" else "on a CPU"
        print(f"nothing to warm: {where} PyTorch runs the program and nothing is compiled")
    else:
        print(warmed)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from monograph.model.doctor import diagnose

    diagnosis = diagnose()
    if args.json:
        print(diagnosis.to_json())
    else:
        print("\n".join(printable(line) for line in str(diagnosis).splitlines()))
    return 0 if diagnosis.can_run else 1


def _load(args: argparse.Namespace) -> Engine:
    import monograph

    if sys.stderr is None or not sys.stderr.isatty():
        return monograph.load(args.model, **_load_options(args))
    with LoadLine() as progress:
        return monograph.load(args.model, **_load_options(args), progress=progress)


def _load_options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in LOAD_OPTIONS}


def _answer_options(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_new_tokens": args.max_new_tokens, "stop": args.stop}


def _sampling(args: argparse.Namespace) -> Sampling:
    import monograph

    return monograph.Sampling(**{name: getattr(args, name) for name in SAMPLING_FLAGS})


def _prompt_ids(engine: Engine, prompt: str, args: argparse.Namespace) -> str | list[int]:
    if args.raw or engine.tokenizer.chat_template is None:
        if args.system is not None:
            raise PromptError("--system needs a model with a chat template, and this one has none")
        return prompt
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    messages.append({"role": "user", "content": prompt})
    return engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def _read_stdin() -> str:
    """The prompt from standard input, less the line end that `echo` adds."""
    if sys.stdin is None:  # closed by the caller
        return ""
    return _as_text(sys.stdin.buffer.read(), "standard input")


def _read_file(path: str) -> str:
    """The prompt from a file, less the line end that editors add."""
    try:
        return _as_text(Path(path).read_bytes(), path)
    except OSError as error:
        raise PromptError(f"{path}: the prompt cannot be read: {error.strerror or error}") from error


def _as_text(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise PromptError(f"{source} is not UTF-8 text (byte {error.start})") from None


def _to_json(completion: Completion) -> str:
    fields = dataclasses.asdict(completion)
    fields["stats"]["tokens_per_s"] = completion.stats.tokens_per_s
    text = json.dumps(fields, ensure_ascii=False)
    # JSON leaves DEL and C1 as they are; they occur in strings only, and must not steer a terminal.
    return text.translate({code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)})


def _usage_error(message: str) -> NoReturn:
    complain(message)
    raise SystemExit(2)


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected 1 to 3600, got {text}")
    return value


_seconds.__name__ = "number"


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


_count.__name__ = "number"  # argparse names the type in "invalid number value"


def _text(text: str) -> str:
    """Text that a tokenizer can take: an argument that is not UTF-8 reaches Python as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"not UTF-8 text (character {error.start + 1})") from None
    return text


@contextlib.contextmanager
def _plain_output() -> Iterator[None]:
    """Warnings as one line; characters that the terminal's encoding lacks as '?', not as a crash in mid-answer.

    A stream that the caller has closed takes what is written, as /dev/null does.
    """
    before = sys.stdout, sys.stderr
    nowhere = Path(os.devnull).open("w", encoding="utf-8") if None in before else None  # noqa: SIM115  # closed below
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    logger, handler = logging.getLogger("monograph"), _WarningLines(logging.WARNING)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_args, **_kwargs: complain(f"warning: {message}")
            yield
    finally:
        logger.removeHandler(handler)
        if nowhere is not None:
            sys.stdout, sys.stderr = before
            nowhere.close()


class _TuneLines:
    """Says what tuning finds, and once a second how far it is."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, progress: TuneProgress) -> None:
        if not progress.text and progress.seconds < self._next:
            return
        self._next = progress.seconds + 1
        text = (
            progress.text or f"{progress.stage} {progress.done} of {progress.total}, {progress.gain:.1%} faster so far"
        )
        print(f"{progress.seconds:5.1f} s: {text}", flush=True)


class _WarningLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        complain(f"warning: {record.getMessage()}")


class _Parser(argparse.ArgumentParser):
    """A parser whose help is the same on every terminal and Python version."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=100), **kwargs
        )
        self.color = False


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_args: object) -> NoReturn:
        import monograph

        print(f"monograph {monograph.__version__}")
        parser.exit()
