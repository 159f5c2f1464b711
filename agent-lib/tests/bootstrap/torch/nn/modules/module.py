_hooks = {}


class _Handle:
    def __init__(self, hook):
        _hooks[id(self)] = hook

    def remove(self):
        _hooks.pop(id(self), None)


def register_module_module_registration_hook(hook):
    return _Handle(hook)


class Module:
    def __init__(self):
        self.__dict__.update(_modules={}, _parameters={}, _buffers={})

    def __setattr__(self, name, value):
        if isinstance(value, Module):
            for hook in list(_hooks.values()):
                hook(self, name, value)
            self._modules[name] = value
        else:
            self.__dict__[name] = value

    def __getattr__(self, name):
        if name in self.__dict__.get("_modules", ()):
            return self._modules[name]
        raise AttributeError(name)

    def _wrapped_call_impl(self, *arguments):
        return self.forward(*arguments)

    __call__ = _wrapped_call_impl

    def _apply(self, function):
        return function(self)

    def load_state_dict(self, function):
        return function(self)
