"""What was measured, and the jobs that measured it. Not part of the wheel."""
