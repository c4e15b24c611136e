"""Environments from whatever a user has: a name, a function that makes them, or an environment.

A name is that of a built-in environment ("cue"), a Gymnasium id ("CartPole-v1"), or `package.module:function`, a function or class of the
user's own that makes one environment; the current folder is importable. A function that takes `num_envs` makes all of them at once.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from esper.vecenv.builtin import BUILTIN
from esper.vecenv.contract import VecEnv

if TYPE_CHECKING:
    import gymnasium

EnvSource = Any  # a name, a function, a Gymnasium environment or vector environment, or a VecEnv
Wrapper = Callable[[Any], Any] | str  # from one Gymnasium environment to another, or where to find such a function

_GIVEN: dict[str, EnvSource] = {}  # names that hold only inside `named`


def make(
    env: EnvSource,
    num_envs: int,
    *,
    seed: int | None = None,
    device: str | torch.device = "cpu",
    wrappers: Sequence[Wrapper] = (),
    **kwargs: Any,
) -> VecEnv:
    """`num_envs` environments: a built-in name such as "cue", a Gymnasium id such as "CartPole-v1", "mycode:make_env", or a function.

    `env` may also be one Gymnasium environment, which is taken with copies of it if there are to be several, or a vector environment of as
    many. `wrappers` go around each single Gymnasium environment, the first one innermost. `seed` is what the first `reset()` uses unless
    it is given one. `kwargs` go to the built-in environment, to `gymnasium.make_vec`, or to the function. Gymnasium's environments live on
    the CPU; `vectorization_mode="async"` puts each into a process of its own.

    >>> make("cue", 2, delay=5).observation_spec
    {'obs': TensorSpec(shape=(5,), dtype='float32')}
    """
    if isinstance(env, str):
        env = _GIVEN.get(env, env)
    if isinstance(env, str) and env in BUILTIN:
        if wrappers:
            raise ValueError(f"{env!r} is a built-in environment, and wrappers go around Gymnasium environments; leave them out")
        return BUILTIN[env].factory(num_envs, device=device, seed=0 if seed is None else seed, **kwargs)
    if isinstance(env, VecEnv):
        _check_batch(env, num_envs, wrappers)
        return env
    _check_gymnasium(env)
    from esper.vecenv.gymnasium import from_gymnasium

    if torch.device(device).type != "cpu":
        raise ValueError(f"{env!r} is a Gymnasium environment and lives on the CPU; got device={str(device)!r}")
    made = _make_gymnasium(env, num_envs, [named_object(each) if isinstance(each, str) else each for each in wrappers], kwargs)
    return made if isinstance(made, VecEnv) else from_gymnasium(made, seed=seed)


def _make_gymnasium(env: EnvSource, num_envs: int, wrappers: Sequence[Callable[[Any], Any]], kwargs: dict[str, Any]) -> Any:
    """A vector environment, or what the user's own function made."""
    import gymnasium

    source = _function_of(env) if isinstance(env, str) else env
    if isinstance(source, gymnasium.vector.VectorEnv):
        _check_batch(source, num_envs, wrappers)
        return source
    if isinstance(source, gymnasium.Env):
        source = _itself_and_copies(source)
    if callable(source):
        return _call(source, num_envs, wrappers, kwargs)
    if not isinstance(source, str):
        raise ValueError(
            f"an environment is a name, a function that makes one, or an environment of Gymnasium; got a {type(source).__name__}"
        )
    if wrappers:  # which the vectorised form of an environment would not have
        kwargs = {"vectorization_mode": "sync", **kwargs, "wrappers": wrappers}
    try:
        if kwargs.get("vectorization_mode", None if gymnasium.spec(source).vector_entry_point else "sync") in ("sync", "async"):
            # Gymnasium's own choice spends the step after every end on a reset: half of all steps where episodes have one.
            same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
            kwargs = {**kwargs, "vector_kwargs": {**same_step, **(kwargs.get("vector_kwargs") or {})}}
        return gymnasium.make_vec(source, num_envs=num_envs, **kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        raise ValueError(f"no environment named {source!r}; {_nearest(source, [*BUILTIN, *gymnasium.registry])}") from error


def _call(function: Callable[..., Any], num_envs: int, wrappers: Sequence[Callable[[Any], Any]], kwargs: dict[str, Any]) -> Any:
    """What a function makes: all environments at once, or one at a time, which are put into one vector environment."""
    from gymnasium import Env
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

    if "num_envs" in inspect.signature(function).parameters:
        made = function(num_envs=num_envs, **kwargs)
        if not isinstance(made, VecEnv | VectorEnv):
            raise ValueError(f"{_name_of(function)} takes num_envs, and so must make a VectorEnv or a VecEnv; got a {type(made).__name__}")
        _check_batch(made, num_envs, wrappers)
        return made
    kwargs = dict(kwargs)
    mode = kwargs.pop("vectorization_mode", "sync")
    if mode not in ("sync", "async"):
        raise ValueError(f"vectorization_mode is 'sync' or 'async' for a function that makes one environment; got {mode!r}")

    def make_one() -> Any:
        env = function(**kwargs)
        if not isinstance(env, Env):
            raise ValueError(f"{_name_of(function)} must make a gymnasium.Env; got a {type(env).__name__}")
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    return (SyncVectorEnv if mode == "sync" else AsyncVectorEnv)([make_one] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def make_single(env: EnvSource, *, wrappers: Sequence[Wrapper] = (), render_mode: str | None = None, **kwargs: Any) -> Any:
    """One Gymnasium environment from a name, a function or an environment, in its wrappers.

    A function gets `render_mode` where it takes such a keyword, and else makes environments as it does.
    """
    if isinstance(env, str):
        env = _GIVEN.get(env, env)
    if isinstance(env, str) and env in BUILTIN:
        raise ValueError(f"{env!r} is a built-in environment, which exists only as a batch; name one of Gymnasium")
    _check_gymnasium(env)
    import gymnasium

    source = _function_of(env) if isinstance(env, str) else env
    kwargs.pop("vectorization_mode", None)
    if isinstance(source, str):
        try:
            made = gymnasium.make(source, render_mode=render_mode, **kwargs)
        except gymnasium.error.UnregisteredEnv as error:
            raise ValueError(f"no environment named {source!r}; {_nearest(source, [*BUILTIN, *gymnasium.registry])}") from error
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
    """A function that gives an environment itself, and then others like it."""
    is_given = False

    def make_one() -> Any:
        nonlocal is_given
        if not is_given:
            is_given = True
            return env
        try:
            return copy.deepcopy(env)
        except Exception as error:  # whatever of it cannot be copied: windows, sockets, handles of a simulator
            raise ValueError(
                f"{env} cannot be copied ({type(error).__name__}: {error}); give a function that makes the environment"
            ) from error

    return make_one


def _check_batch(env: Any, num_envs: int, wrappers: Sequence[Wrapper]) -> None:
    if env.num_envs != num_envs:
        raise ValueError(f"the environment given is a batch of {env.num_envs}, and {num_envs} were asked for")
    if wrappers:
        raise ValueError("wrappers go around single environments, and the environment given is a batch; wrap them where it is made")


@contextlib.contextmanager
def named(name: str, env: EnvSource | None) -> Iterator[None]:
    """Inside, `make(name, ...)` makes environments from `env`; nothing changes where that is None."""
    if env is None:
        yield
        return
    import gymnasium

    if isinstance(env, VecEnv | gymnasium.vector.VectorEnv):
        raise ValueError("a run makes environments for training and for evaluation; give a function that makes a batch: make_env(num_envs)")
    # One function for all calls, so that the environment itself is trained in and only copies are evaluated in.
    _GIVEN[name] = _itself_and_copies(env) if isinstance(env, gymnasium.Env) else env
    try:
        yield
    finally:
        del _GIVEN[name]


def named_object(name: str) -> Any:
    """What `package.module:name` names, with the current folder importable."""
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ValueError(f"{name!r}: expected package.module:name, such as mycode:make_env")
    found = _attribute_of(module_name, attribute)
    if found is None:
        raise ValueError(f"{name!r}: the module {module_name} has no {attribute!r}")
    return found


def _function_of(name: str) -> Any:
    """What makes the environment of this name: a function of the user's, or the name itself where Gymnasium shall find it."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        return name
    return _attribute_of(module_name, attribute) or name  # Gymnasium's ids may have a module in front too


def _attribute_of(module_name: str, attribute: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no module {error.name!r}, neither in {here} nor among the installed packages; run esper in the folder of your code"
        ) from error


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _check_gymnasium(env: EnvSource) -> None:
    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{env!r} is none of the built-in environments {sorted(BUILTIN)}, and Gymnasium is not installed: pip install 'esper-grow[gym]'"
        ) from error


def _nearest(wanted: str, known: list[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    near = [by_lower[name] for name in get_close_matches(wanted.lower(), by_lower, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"the built-in ones are {sorted(BUILTIN)}"
