"""One registry for runners, learners and credit schemes."""

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from marl.utils.class_facts import check_class
from marl.utils.near import did_you_mean
from marl.utils.numbers import out_of_bounds

T = TypeVar("T")


class Registry(Generic[T]):
    """Name -> class, filled by decorator.

    A registered class carries a ``Config`` dataclass, which becomes the Hydra option ``<kind>=<name>``: its fields are
    typed, have defaults and can be overridden by key. No YAML is needed.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        def decorate(cls: Any) -> Any:
            taken = self._entries.get(name)
            if taken is not None and where(taken) != where(cls):
                raise ValueError(
                    f"{self.kind} {name!r} is already taken by {where(taken)}; register {where(cls)} under another name"
                )
            self._entries[name] = cls
            ConfigStore.instance().store(group=self.kind, name=name, node=cls.Config(name=name))
            return cls

        return decorate

    def get(self, name: str) -> type[T]:
        if name not in self._entries:
            raise ValueError(
                f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}.{did_you_mean(name, self._entries)}"
            )
        return self._entries[name]

    def build(self, node: Any, **dependencies: Any) -> T:
        """Make the object that the Hydra node names, with its typed config and what it needs at run time."""
        make: Any = self.get(node.name)
        return make(OmegaConf.to_object(node), **dependencies)

    def described(self, key: str, options: Mapping[str, Any]) -> type[T]:
        """The class that a group of the configuration, called ``key``, names. Raises ValueError for unknown names and
        options."""
        if "name" not in options:
            raise ValueError(f"{key}={dict(options)}: no name; expected one of {', '.join(self.names())}")
        cls: Any = self.get(options["name"])
        check_class(cls)
        known = cls.Config.__dataclass_fields__
        for option in options:
            if option not in known:
                raise ValueError(
                    f"{key}.{option}: {self.kind} {options['name']!r} has no such key; known: {', '.join(known)}."
                    f"{did_you_mean(option, known)}"
                )
        return cls

    def names(self) -> list[str]:
        return sorted(self._entries)


def typed(key: str, config: type, options: Mapping[str, Any]) -> Any:
    """The typed config of these options. Raises ValueError for values of another type, or out of a field's bound."""
    try:
        node = OmegaConf.merge(OmegaConf.structured(config), dict(options))
        made = OmegaConf.to_object(node)
    except ValueError as error:
        name = getattr(error, "full_key", None)
        place = f"{key}.{name}={options.get(name)}" if name else f"{key}={dict(options)}"
        raise ValueError(f"{place}: {str(error).splitlines()[0]}") from None
    for message in out_of_bounds(node, key):
        raise ValueError(message)
    return made


def where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
