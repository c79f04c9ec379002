"""Property tests draw the same examples in every run; `pytest --hypothesis-profile=search` draws
new ones."""

from hypothesis import HealthCheck, settings

SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("fixed", derandomize=True, **SLOW)
settings.register_profile("search", derandomize=False, **SLOW)
settings.load_profile("fixed")
