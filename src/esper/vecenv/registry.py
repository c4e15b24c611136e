"""Make batched environments from a name, a function, or an environment.

A name is one of these; modules are also looked up in the current folder:
    cue                       a built-in environment
    CartPole-v1               a Gymnasium id: the environment that `gymnasium.make` makes
    package.module:id         an id that is registered when the module is imported
    package.module:function   the user's own function or class, which makes one environment, or all at once if it has a parameter `num_envs`
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from esper.vecenv.builtin import BUILTIN
from esper.vecenv.contract import VecEnv, is_vec_env

if TYPE_CHECKING:
    import gymnasium

EnvSource = Any  # a name, a function, a Gymnasium environment or vector environment, or a VecEnv
Wrapper = Callable[[Any], Any] | str  # function from one Gymnasium environment to another, or its name "package.module:function"

_FOREIGN = {  # libraries whose environments have another form -> advice
    "stable_baselines3": "give the function that makes one environment, and num_envs",
    "pettingzoo": "it has several agents; write a VecEnv with one row for each of them (esper.vecenv.VecEnv), or a Gymnasium environment",
    "gym": "that is the predecessor of Gymnasium; convert it, for example by shimmy.GymV26CompatibilityV0",
}
_GIVEN: dict[str, EnvSource] = {}  # names that are defined only inside `named`
# Beginning of an id -> the package that registers it when it is imported, and the name that pip knows it by.
_PACKAGES = {"ALE/": ("ale_py", "ale-py"), "MiniGrid-": ("minigrid", "minigrid"), "BabyAI-": ("minigrid", "minigrid")}
# Ids whose native vector form plays the game of `gymnasium.make(id)`: single form and vector form. Others may play another one; that of
# ale-py clips rewards and has no sticky actions. tests/vecenv/test_ids.py compares 10,000 steps of every entry.
_CARTPOLE = "gymnasium.envs.classic_control.cartpole:"
SAME_GAME = {f"CartPole-v{version}": (f"{_CARTPOLE}CartPoleEnv", f"{_CARTPOLE}CartPoleVectorEnv") for version in (0, 1)}


def make(
    env: EnvSource,
    num_envs: int,
    *,
    seed: int | None = None,
    device: str | torch.device = "cpu",
    wrappers: Sequence[Wrapper] = (),
    **kwargs: Any,
) -> VecEnv:
    """Make `num_envs` environments from a name such as "cue", "CartPole-v1" or "mycode:make_env", a function, or an environment.

    If `env` is one Gymnasium environment, the batch consists of it and copies of it. If it is a VecEnv or a Gymnasium vector environment,
    it must have `num_envs` environments. `wrappers` are applied to each single Gymnasium environment, the first one innermost. `seed` is
    used by the first `reset()` that is called without one. `kwargs` go to the built-in environment, to `gymnasium.make`, or to the
    function; those of `gymnasium.make_vec` work as there. Gymnasium's environments run on the CPU: `vectorization_mode="async"` runs each
    in its own process, and "vector_entry_point" takes the native vector form of an id, which may play by other rules than the id.

    >>> make("cue", 2, delay=5).observation_spec
    {'obs': TensorSpec(shape=(5,), dtype='float32')}
    """
    if isinstance(env, str):
        env = _GIVEN.get(env, env)
    if isinstance(env, str) and env in BUILTIN:
        if wrappers:
            raise ValueError(f"{env!r} is a built-in environment, and wrappers go around Gymnasium environments; leave out the wrappers")
        return BUILTIN[env].factory(num_envs, device=device, seed=0 if seed is None else seed, **kwargs)
    if is_vec_env(env):
        _check_batch(env, num_envs, wrappers)
        return env
    _check_gymnasium(env)
    from esper.vecenv.gymnasium import from_gymnasium

    if torch.device(device).type != "cpu":
        raise ValueError(f"{env!r} is a Gymnasium environment, which runs on the CPU; got device={str(device)!r}, use device='cpu'")
    functions = [named_object(each) if isinstance(each, str) else each for each in wrappers]
    made = _make_gymnasium(_resolved(env), num_envs, functions, kwargs)
    return made if is_vec_env(made) else from_gymnasium(made, seed=seed)


def _make_gymnasium(source: EnvSource, num_envs: int, wrappers: Sequence[Callable[[Any], Any]], kwargs: dict[str, Any]) -> Any:
    """Return a Gymnasium vector environment, or the result of the user's own function."""
    import gymnasium
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

    if isinstance(source, VectorEnv):
        _check_batch(source, num_envs, wrappers)
        return source
    if isinstance(source, gymnasium.Env):
        source = _itself_and_copies(source)
    is_id = isinstance(source, gymnasium.envs.registration.EnvSpec)
    if not is_id and not callable(source):
        raise ValueError(f"an environment is a name, a function that makes one, or an environment of Gymnasium; got {_foreign(source)}")
    if not is_id and "num_envs" in inspect.signature(source).parameters:
        made = source(num_envs=num_envs, **kwargs)
        if not is_vec_env(made) and not isinstance(made, VectorEnv):
            raise ValueError(f"{_name_of(source)} takes num_envs, so it must make a VectorEnv or a VecEnv; got {_foreign(made)}")
        _check_batch(made, num_envs, wrappers)
        return made

    # An id without a single form has only its native one. Otherwise that one is used where it is asked for, or is the same game.
    modes = ("sync", "async", "vector_entry_point") if is_id else ("sync", "async")
    mode, kwargs = kwargs.get("vectorization_mode"), {key: value for key, value in kwargs.items() if key != "vectorization_mode"}
    mode = getattr(mode, "value", mode)  # Gymnasium takes an enum too
    if mode is None:
        is_same = is_id and SAME_GAME.get(source.id) == (source.entry_point, source.vector_entry_point) and not (wrappers or kwargs)
        mode = "vector_entry_point" if is_same or (is_id and source.entry_point is None) else "sync"
    if mode not in modes:
        raise ValueError(f"vectorization_mode must be {' or '.join(map(repr, modes))} for {_name_of(source)}; got {mode!r}")
    if mode == "vector_entry_point":
        if wrappers:
            raise ValueError(f"wrappers go around single environments, but {_name_of(source)} is made as a batch; leave out the wrappers")
        return gymnasium.make_vec(source, num_envs=num_envs, vectorization_mode=mode, **kwargs)

    # Gymnasium's default, NEXT_STEP, spends one step per episode on the reset: half of all steps if episodes have one step.
    vector_kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP, **(kwargs.pop("vector_kwargs", None) or {})}

    owner = os.getpid()

    def make_one() -> Any:
        if os.getpid() != owner:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes, and only the first one answers it
        env = gymnasium.make(source, **kwargs) if is_id else source(**kwargs)
        if not isinstance(env, gymnasium.Env):
            raise ValueError(f"{_name_of(source)} must make a gymnasium.Env; got {_foreign(env)}")
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    return (SyncVectorEnv if mode == "sync" else AsyncVectorEnv)([make_one] * num_envs, **vector_kwargs)


def make_single(env: EnvSource, *, wrappers: Sequence[Wrapper] = (), render_mode: str | None = None, **kwargs: Any) -> Any:
    """Make one Gymnasium environment from a name, a function or an environment, and apply the wrappers.

    `render_mode` is passed to a function only if it accepts such a keyword.
    """
    if isinstance(env, str):
        env = _GIVEN.get(env, env)
    if isinstance(env, str) and env in BUILTIN:
        raise ValueError(f"{env!r} is a built-in environment, which exists only as a batch; name an environment of Gymnasium")
    _check_gymnasium(env)
    import gymnasium

    source = _resolved(env)
    kwargs = {key: value for key, value in kwargs.items() if key not in ("vectorization_mode", "vector_kwargs")}
    if isinstance(source, gymnasium.envs.registration.EnvSpec):
        made = gymnasium.make(source, render_mode=render_mode, **kwargs)
    elif callable(source):
        parameters = inspect.signature(source).parameters.values()
        if any(each.name == "render_mode" or each.kind is each.VAR_KEYWORD for each in parameters):
            kwargs["render_mode"] = render_mode
        made = source(**kwargs)
    else:
        made = source
    if not isinstance(made, gymnasium.Env):
        raise ValueError(f"a single environment is a gymnasium.Env; got a {type(made).__name__}")
    for wrapper in wrappers:
        made = (named_object(wrapper) if isinstance(wrapper, str) else wrapper)(made)
    return made


def _itself_and_copies(env: gymnasium.Env[Any, Any]) -> Callable[[], Any]:
    """Return a function whose first call returns `env` itself, and later calls return copies of it."""
    is_given = False

    def make_one() -> Any:
        nonlocal is_given
        if not is_given:
            is_given = True
            return env
        try:
            return copy.deepcopy(env)
        except Exception as error:  # windows, sockets or handles of a simulator cannot be copied, and raise anything
            raise ValueError(
                f"{env} cannot be copied ({type(error).__name__}: {error}); give a function that makes the environment"
            ) from error

    return make_one


def _check_batch(env: Any, num_envs: int, wrappers: Sequence[Wrapper]) -> None:
    if env.num_envs != num_envs:
        raise ValueError(f"the given environment is a batch of {env.num_envs}, but {num_envs} were asked for; use num_envs={env.num_envs}")
    if wrappers:
        raise ValueError("wrappers go around single environments, but the given environment is a batch; apply them where it is made")


@contextlib.contextmanager
def named(name: str, env: EnvSource | None) -> Iterator[None]:
    """Make environments from `env` wherever `make(name, ...)` is called inside the context. None changes nothing."""
    if env is None:
        yield
        return
    import gymnasium

    if is_vec_env(env) or isinstance(env, gymnasium.vector.VectorEnv):
        raise ValueError("a run makes environments for training and for evaluation; give a function that makes a batch: make_env(num_envs)")
    # Use one function for all calls of `make`: training, which comes first, gets the environment itself, and evaluation gets copies.
    _GIVEN[name] = _itself_and_copies(env) if isinstance(env, gymnasium.Env) else env
    try:
        yield
    finally:
        del _GIVEN[name]


def named_object(name: str) -> Any:
    """Return the object named `package.module:name`. The current folder is importable."""
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ValueError(f"{name!r}: expected package.module:name, such as mycode:make_env")
    found = _attribute_of(module_name, attribute)
    if found is None:
        raise ValueError(f"{name!r}: the module {module_name} has no {attribute!r}")
    return found


def _resolved(env: EnvSource) -> EnvSource:
    """Return what a name stands for: the user's function, or the specification of a Gymnasium id. Anything else is returned as it is."""
    if not isinstance(env, str):
        return env
    import gymnasium

    module_name, colon, name = env.rpartition(":")
    if colon and (found := _attribute_of(module_name, name)) is not None:
        return found  # otherwise the module has been imported now, and may have registered an id of this name
    package = next((package for beginning, package in _PACKAGES.items() if name.startswith(beginning)), None)
    if package is not None and find_spec(package[0]) is not None:
        importlib.import_module(package[0])
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    # Like `gymnasium.make`, take the newest version if the name has none.
    versions = {
        int(found[1]): spec for each, spec in gymnasium.registry.items() if (found := re.fullmatch(rf"{re.escape(name)}-v(\d+)", each))
    }
    if versions:
        return versions[max(versions)]
    raise ValueError(_unknown(env, package))


def _unknown(env: str, package: tuple[str, str] | None) -> str:
    """Return the message for a name that stands for nothing, with the nearest functions and ids."""
    import gymnasium

    module_name, colon, name = env.rpartition(":")
    if package is not None and package[0] not in sys.modules:
        return f"{env!r} comes with a package that is not installed: pip install {package[1]}"
    if not colon:
        others = f"the built-in ones are {', '.join(sorted(BUILTIN))}; an id that a package registers is written package:{name}"
        return f"no environment named {env!r}; {_nearest(name, [*BUILTIN, *gymnasium.registry]) or others}"
    functions = [own for own, value in vars(sys.modules[module_name]).items() if callable(value) and not own.startswith("_")]
    near = _nearest(name, [*functions, *gymnasium.registry]) or f"it has {', '.join(functions) or 'no function'}"
    return f"{module_name} has no {name} and registers no such id; {near}"


def _attribute_of(module_name: str, attribute: str) -> Any:
    """Import a module, also from the current folder, and return its attribute; None if it has no such attribute."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        # The module may exist and fail to import another one; that error must not be hidden.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no module {error.name!r}, neither in {here} nor among the installed packages; run esper in the folder of your code"
        ) from error


def _foreign(made: Any) -> str:
    """Return what something is that is no environment here and, for environments of other libraries, what to give instead."""
    modules = {base.__module__.partition(".")[0] for base in type(made).__mro__}
    for library, advice in _FOREIGN.items():
        if library in modules:
            return f"a {type(made).__name__} of {library}: {advice}"
    return f"a {type(made).__name__}"


def _name_of(source: Any) -> str:
    """Return the name of a function, or the id of a specification."""
    return getattr(source, "__qualname__", None) or getattr(source, "id", None) or repr(source)


def _check_gymnasium(env: EnvSource) -> None:
    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{env!r} is not a built-in environment ({', '.join(sorted(BUILTIN))}), and Gymnasium is not installed: "
            "pip install 'esper-grow[gym]'"
        ) from error


def _nearest(wanted: str, known: list[str]) -> str:
    """Return a question that names the nearest known names; nothing if none is near."""
    by_lower = {name.lower(): name for name in known}
    near = [by_lower[name] for name in get_close_matches(wanted.lower(), by_lower, n=3, cutoff=0.6)]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""
