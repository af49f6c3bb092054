# Four regions on three continents, v5p and v6e in one run; some learners may be preempted, one is of
# a reservation, one has two slices of four hosts, one is a machine without accelerators.
project = "my-project"
run     = "demo"

run_toml    = "examples/run.toml"
auth_folder = "../../build/auth"                                                 # diloco auth init build/auth ...
releases    = { cpu = "../../build/cpu.tar.gz", tpu = "../../build/tpu.tar.gz" } # make release ...

bucket_location = "us-central1" # beside the aggregators
subnets = {
  us-central1     = "10.64.0.0/20"
  us-east5        = "10.64.16.0/20"
  europe-west4    = "10.64.32.0/20"
  asia-northeast1 = "10.64.48.0/20"
}

nats = {
  zones         = ["us-central1-a", "us-central1-b", "us-central1-c"]
  machine_type  = "n2-standard-4"
  disk_gib      = 100
  snapshot_days = 14
}

aggregators = {
  aggregator-a = { zone = "us-central1-a" }
  aggregator-b = { zone = "us-central1-b" }
}

learners = {
  central  = { zone = "us-central1-a", kind = "v5p", chips = 4, reservation = "my-reservation" }
  east     = { zone = "us-east5-a", kind = "v6e", chips = 8, spot = true }
  east-two = { zone = "us-east5-b", kind = "v6e", chips = 4, spot = true, warm_start = true }
  europe   = { zone = "europe-west4-b", kind = "v5p", chips = 4, spot = true }
  tokyo    = { zone = "asia-northeast1-b", kind = "v6e", chips = 8 }
  slice    = { zone = "us-east5-b", kind = "v6e", topology = "4x4", slices = 2, spot = true } # 4 hosts each
  tester   = { zone = "us-central1-b", kind = "cpu", machine_type = "n2-standard-8" }
}

caches = ["us-east5-b"] # its three learners read each version once from the bucket

operators         = ["group:training@example.org"]
monitoring_ranges = ["10.64.0.0/20"]
