"""`vlp use` looks at the captions: a preset whose vocabulary would destroy words gets another one."""
