"""Suspicion: draws, evidence, what is owed, verdicts, and the standing that follows."""
