# Gemma 3 12B over four regions on two continents: two learners of 64 v5p and two of 64 v6e, of 16 hosts each.
project = "my-project"
data    = "gs://my-data/tokens" # of diloco data prepare; copied to each host, so disk_gib holds it too
run     = "gemma-12b"

run_toml    = "examples/gemma-12b-run.toml"
auth_folder = "../../build/gemma-12b/auth"                                       # diloco auth init build/gemma-12b/auth --run gemma-12b ...
releases    = { cpu = "../../build/cpu.tar.gz", tpu = "../../build/tpu.tar.gz" } # make release ...

bucket_location = "us-central1" # beside the aggregators
subnets = {
  us-central1  = "10.64.0.0/20"
  us-east5     = "10.64.16.0/20"
  us-east1     = "10.64.32.0/20"
  europe-west4 = "10.64.48.0/20"
}

nats = { zones = ["us-central1-a", "us-central1-b", "us-central1-c"] }

# Either one alone holds the model: what diloco host provision chooses for it.
aggregators = {
  aggregator-a = { zone = "us-central1-a", machine_type = "n2-highmem-32" }
  aggregator-b = { zone = "us-central1-b", machine_type = "n2-highmem-32" }
}

learners = {
  central = { zone = "us-central1-a", kind = "v5p", topology = "4x4x4", spot = true }
  east    = { zone = "us-east5-a", kind = "v5p", topology = "4x4x4", spot = true }
  coast   = { zone = "us-east1-d", kind = "v6e", topology = "8x8", spot = true }
  europe  = { zone = "europe-west4-a", kind = "v6e", topology = "8x8", spot = true }
}
