"""Who did what: signed headers and birth records, and (later) audits, evidence, disputes and standing. Pure."""
