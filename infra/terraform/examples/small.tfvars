# Two regions, small: two learners of one TPU host each, which may be preempted.
project = "my-project"
run     = "demo"

run_toml    = "examples/run.toml"
auth_folder = "../../build/auth"                                                 # diloco auth init build/auth ...
releases    = { cpu = "../../build/cpu.tar.gz", tpu = "../../build/tpu.tar.gz" } # make release ...

bucket_location = "us-central1"
subnets = {
  us-central1 = "10.64.0.0/20"
  us-east5    = "10.64.16.0/20"
}

nats = { zones = ["us-central1-a", "us-central1-b", "us-central1-c"] }

aggregators = {
  aggregator-a = { zone = "us-central1-a", machine_type = "n2-standard-4" }
  aggregator-b = { zone = "us-central1-b", machine_type = "n2-standard-4" }
}

learners = {
  central = { zone = "us-central1-a", kind = "v5p", chips = 4, spot = true }
  east    = { zone = "us-east5-a", kind = "v6e", chips = 4, spot = true }
}
