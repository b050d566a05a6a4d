"""The phases of a search: candidates proposed and screened, the near-best timed again, a decision."""
