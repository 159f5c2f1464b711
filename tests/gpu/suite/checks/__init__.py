"""The checks in their order of execution: cheap and informative ones first, because time may run out."""

from . import probe  # noqa: F401
from . import facts  # noqa: F401
from . import attach  # noqa: F401
from . import cupti  # noqa: F401
from . import live  # noqa: F401
from . import kinds  # noqa: F401
from . import pools  # noqa: F401
from . import gap  # noqa: F401
from . import table  # noqa: F401
from . import faults  # noqa: F401
from . import processes  # noqa: F401
from . import views  # noqa: F401
from . import cost  # noqa: F401
from . import nvml_cost  # noqa: F401
from . import pytorch  # noqa: F401
from . import names  # noqa: F401
from . import libs  # noqa: F401
