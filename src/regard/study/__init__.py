"""Many runs, one answer: does QK norm help on these images?"""
