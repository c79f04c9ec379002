"""Many runs, one answer: does QK norm help on these images?"""

from regard.study.options import StudyOptions
from regard.study.study import StudyResult, study

__all__ = ["StudyOptions", "StudyResult", "study"]
