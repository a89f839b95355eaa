"""What each verb of the command does: it reads, works and prints; `commands` calls it with what was given."""
