"""Growth as a reinforcement-learning problem: what a controller sees, what it is paid, how it learns, and how it acts."""
