"""The experiments there are, by the name that a config gives in its `experiment:` key.

An experiment is a module. It must have

- `Config`: a frozen dataclass with `experiment: str`, `seed: int = 0` and fields of its own. A field of type
  `pathlib.Path` says where something lies, not what is computed, and stays out of the run's identity.
- `DESCRIPTION`: one line, a literal string.
- `run(config, run_dir, progress) -> Results`: computes, writes files into the run directory, returns the results.

and may have

- `resolve(config) -> Config`: fills in what a run depends on and the file leaves open (the hash of a trace), before the
  config is hashed and written; refuses here, with a ValueError, what can be refused before the run has a directory.
- `parts(config) -> list[str]`: the names under which it calls `run_dir.part`, so that an unfinished run can be told
  what is missing.
- `failed_checks(results) -> list[str]`: one sentence for each thing that should hold and does not. Any makes the
  run's status `failed` and its exit code 1.
- `run_together(configs, run_dirs, progress) -> Iterable[Callable[[], Results]]`: the same as `run` for several points
  of a sweep at once, for an experiment whose points share what it compiles; yields of each in order, before it goes on,
  what is called for its results, or raises what is wrong with this one, so that others lose nothing by it. The sooner
  the less is lost if the sweep is killed. Results must be those that `run` gives, bit for bit.
- `tables(results) -> list[results.Table]`: its tables, in the terminal and in the report; without it, one table of
  names and metrics.
- `render(results, console)`: prints them in the terminal in a way of its own.
- `figures(run_path) -> list[plots.Figure]`: drawn from the files of the run alone.
- `GLOSSARY: Mapping[str, str]`: metric to a plain explanation, shown in the report.
- `MODELLED: frozenset[str]`: metrics that come from a cost model; they carry the word wherever they are shown.
"""

import ast
import dataclasses
import importlib
import importlib.util
import pathlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import rich.console

from experiments import results
from experiments.errors import UserError, did_you_mean

EXPERIMENTS: Mapping[str, str] = {
    "allocator_bench": "experiments.allocator_bench",
    "block_size": "experiments.block_size",
    "capacity": "experiments.capacity",
    "capacity_vs_rate": "experiments.capacity_vs_rate",
    "compile": "experiments.compile",
    "disaggregation": "experiments.disaggregation",
    "fp8_quality": "experiments.fp8_quality",
    "fuzz": "experiments.fuzz",
    "kernel_bench": "experiments.kernel_bench",
    "memory_waste": "experiments.memory_waste",
    "paged_vs_contiguous": "experiments.paged_vs_contiguous",
    "packing": "experiments.packing",
    "parallel_sampling": "experiments.parallel_sampling",
    "preemption": "experiments.preemption",
    "prefix_sharing": "experiments.prefix_sharing",
    "sharded_serving": "experiments.sharded_serving",
    "simulated_server": "experiments.simulated_server",
    "simulator_bench": "experiments.simulator_bench",
    "vattention": "experiments.vattention",
    "vattention_serving": "experiments.vattention_serving",
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A loaded experiment module, its optional parts filled in."""

    name: str
    config_class: type[Any]
    description: str
    run: Callable[..., Any]
    run_together: Callable[..., Iterable[Callable[[], Any]]] | None
    resolve: Callable[[Any], Any]
    parts: Callable[[Any], list[str]]
    failed_checks: Callable[[Any], list[str]]
    tables: Callable[[Any], list[results.Table]]
    render: Callable[..., None] | None
    figures: Callable[[pathlib.Path], list[Any]]
    glossary: Mapping[str, str]
    modelled: frozenset[str]

    def show(self, found: results.Results, console: rich.console.Console) -> None:
        """Prints the results of a run."""
        if self.render is not None:
            self.render(found, console)
        else:
            results.render(self.tables(found), console)


def load(name: str, experiments: Mapping[str, str]) -> Experiment:
    """Imports the module of an experiment.

    Raises:
      UserError: there is no experiment of that name.
      AttributeError: the module lacks something that every experiment must have.
    """
    if name not in experiments:
        raise UserError(
            f"no experiment is called {name!r}{did_you_mean(name, experiments)}; there are: {', '.join(experiments)}"
        )
    module = importlib.import_module(experiments[name])
    return from_module(name, module)


def from_module(name: str, module: ModuleType) -> Experiment:
    """The experiment that a module describes.

    Raises:
      AttributeError: the module lacks `Config`, `DESCRIPTION` or `run`.
    """
    modelled = getattr(module, "MODELLED", frozenset())
    return Experiment(
        name=name,
        config_class=module.Config,
        description=module.DESCRIPTION,
        run=module.run,
        run_together=getattr(module, "run_together", None),
        resolve=getattr(module, "resolve", lambda config: config),
        parts=getattr(module, "parts", lambda config: []),
        failed_checks=getattr(module, "failed_checks", lambda found: []),
        tables=getattr(module, "tables", lambda found: [results.table(found, modelled)]),
        render=getattr(module, "render", None),
        figures=getattr(module, "figures", lambda run_path: []),
        glossary=getattr(module, "GLOSSARY", {}),
        modelled=modelled,
    )


def description(module_name: str) -> str:
    """`DESCRIPTION` of an experiment module, read without importing it: the import would bring in JAX."""
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        return f"(module {module_name} cannot be found)"
    for node in ast.parse(pathlib.Path(spec.origin).read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="DESCRIPTION")], value=ast.Constant(value=str() as text)):
                return text
            case ast.AnnAssign(target=ast.Name(id="DESCRIPTION"), value=ast.Constant(value=str() as text)):
                return text
    return f"(module {module_name} has no DESCRIPTION)"
