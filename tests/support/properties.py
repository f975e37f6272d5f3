"""How many examples of a property `pytest` tries, and `pytest -m hypothesis --hypothesis-profile=weekly`."""

from hypothesis import settings

WEEKLY = "weekly"  # with new examples each time, not the same ones
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile(WEEKLY, deadline=None, print_blob=True)
settings.load_profile("fixed")


def examples(count: int) -> settings:
    is_weekly = settings.get_current_profile_name() == WEEKLY
    return settings(max_examples=50 * count if is_weekly else count)
