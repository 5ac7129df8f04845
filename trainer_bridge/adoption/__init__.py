"""memsaver in other trainers: TRL, verl, and models of PEFT."""
