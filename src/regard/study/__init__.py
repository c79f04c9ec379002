"""Many runs, one answer."""
