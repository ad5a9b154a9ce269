"""How good a compressed cache is: teacher-forced scores, generation tasks, lm-eval."""
