"""Settings shared by every test: hypothesis profiles whose failures can be repeated from the printed seed."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "quire",
    print_blob=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", parent=settings.get_profile("quire"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quire"))  # noqa: TID251
