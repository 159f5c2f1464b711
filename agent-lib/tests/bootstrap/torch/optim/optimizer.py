import functools

_before, _after = [], []


class _Handle:
    def remove(self):
        pass


def register_optimizer_step_pre_hook(hook):
    _before.append(hook)
    return _Handle()


def register_optimizer_step_post_hook(hook):
    _after.append(hook)
    return _Handle()


class Optimizer:
    @staticmethod
    def profile_hook_step(function):
        @functools.wraps(function)
        def wrapper(*arguments, **named):
            for hook in _before:
                hook(arguments[0], arguments, named)
            done = function(*arguments, **named)
            for hook in _after:
                hook(arguments[0], arguments, named)
            return done

        return wrapper


class SGD(Optimizer):
    def __init__(self, parameters):
        self.param_groups, self.state = [{"params": list(parameters)}], {}

    def update(self):
        """What the step does beside its closure; tests replace it."""

    def _step(self, closure=None):
        if closure is not None:
            closure()
        self.update()

    step = Optimizer.profile_hook_step(_step)
