# Wrong inputs are refused before anything is planned. auth_folder and releases come from the
# command line: .ci/terraform.

variables {
  project         = "my-project"
  run             = "demo"
  run_toml        = "examples/run.toml"
  bucket_location = "us-central1"
  subnets         = { us-central1 = "10.64.0.0/20" }
  nats            = { zones = ["us-central1-a", "us-central1-b", "us-central1-c"] }
  aggregators     = { aggregator-a = { zone = "us-central1-a" } }
  learners        = { central = { zone = "us-central1-a", kind = "v5p", chips = 4 } }
}

run "right" {
  command = plan
}

run "bucket_beside_the_first_aggregator" {
  command = plan

  variables {
    bucket_location = null
  }
  assert {
    condition     = lower(local.bucket_location) == "us-central1"
    error_message = "without a location the bucket is in the region of the first aggregator"
  }
}

run "typo_of_a_learner" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v5p", chips = 4, spott = true } }
  }
  expect_failures = [var.learners]
}

run "spot_of_words" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v5p", chips = 4, spot = "maybe" } }
  }
  expect_failures = [var.learners]
}

run "learner_without_disk" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v5p", chips = 4, disk_gib = -5 } }
  }
  expect_failures = [var.learners]
}

run "learner_called_operator" {
  command = plan

  variables {
    learners = { operator = { zone = "us-central1-a", kind = "v5p", chips = 4 } }
  }
  expect_failures = [var.learners]
}

run "two_caches_of_a_region" {
  command = plan

  variables {
    caches = ["us-central1-a", "us-central1-b"]
  }
  expect_failures = [var.caches]
}

run "cache_without_a_range" {
  command = plan

  variables {
    caches = ["mars-north1-a"]
  }
  expect_failures = [var.caches]
}

run "typo_of_an_aggregator" {
  command = plan

  variables {
    aggregators = { aggregator-a = { zone = "us-central1-a", machine = "n2-highmem-8" } }
  }
  expect_failures = [var.aggregators]
}

run "typo_of_nats" {
  command = plan

  variables {
    nats = { zones = ["us-central1-a", "us-central1-b", "us-central1-c"], disk_gb = 50 }
  }
  expect_failures = [var.nats]
}

run "typo_of_images" {
  command = plan

  variables {
    images = { v7x = "projects/p/global/images/i" }
  }
  expect_failures = [var.images]
}

run "typo_of_backstops" {
  command = plan

  variables {
    bucket_backstop_days = { update = 30 }
  }
  expect_failures = [var.bucket_backstop_days]
}

run "project_with_capitals" {
  command = plan

  variables {
    project = "My-Project"
  }
  expect_failures = [var.project]
}

run "run_with_underscore" {
  command = plan

  variables {
    run = "my_run"
  }
  expect_failures = [var.run]
}

run "names_too_long" {
  command = plan

  variables {
    project = "a-project-with-a-long-name"
    run     = "a-run-with-a-name-much-too-long"
  }
  expect_failures = [var.run]
}

run "file_of_another_run" {
  command = plan

  variables {
    run_toml = "tests/other.toml"
  }
  expect_failures = [var.run_toml]
}

run "file_with_sections_of_ours" {
  command = plan

  variables {
    run_toml = "tests/sections.toml"
  }
  expect_failures = [var.run_toml]
}

run "no_file" {
  command = plan

  variables {
    run_toml = "tests/none.toml"
  }
  expect_failures = [var.run_toml]
}

run "no_release" {
  command = plan

  variables {
    releases = { cpu = "none.tar.gz" }
  }
  expect_failures = [var.releases]
}

run "no_release_for_tpus" {
  command = plan

  variables {
    releases = { cpu = var.releases.cpu }
  }
  expect_failures = [var.releases]
}

run "a_release_of_no_kind" {
  command = plan

  variables {
    releases = { cpu = var.releases.cpu, tpu = var.releases.tpu, gpu = var.releases.cpu }
  }
  expect_failures = [var.releases]
}

run "no_auth_folder" {
  command = plan

  variables {
    auth_folder = "tests"
  }
  expect_failures = [var.auth_folder]
}

run "servers_at_other_addresses" {
  command = plan

  variables {
    subnets = { us-central1 = "10.65.0.0/20" }
  }
  expect_failures = [var.auth_folder]
}

run "disk_too_small" {
  command = plan

  variables {
    nats = { zones = ["us-central1-a", "us-central1-b", "us-central1-c"], disk_gib = 5 }
  }
  expect_failures = [var.nats]
}

run "public_range" {
  command = plan

  variables {
    subnets = { us-central1 = "34.64.0.0/20" }
  }
  expect_failures = [var.subnets]
}

run "tiny_range" {
  command = plan

  variables {
    subnets = { us-central1 = "10.64.0.0/29" }
  }
  expect_failures = [var.subnets]
}

run "zone_as_region" {
  command = plan

  variables {
    subnets = { us-central1 = "10.64.0.0/20", us-east5-a = "10.65.0.0/20" }
  }
  expect_failures = [var.subnets]
}

run "bucket_in_a_zone" {
  command = plan

  variables {
    bucket_location = "us-central1-a"
  }
  expect_failures = [var.bucket_location]
}

run "backstop_of_a_day" {
  command = plan

  variables {
    bucket_backstop_days = { updates = 1 }
  }
  expect_failures = [var.bucket_backstop_days]
}

run "two_servers" {
  command = plan

  variables {
    nats = { zones = ["us-central1-a", "us-central1-b"] }
  }
  expect_failures = [var.nats]
}

run "two_servers_in_one_zone" {
  command = plan

  variables {
    nats = { zones = ["us-central1-a", "us-central1-a", "us-central1-b"] }
  }
  expect_failures = [var.nats]
}

run "server_in_a_region_without_range" {
  command = plan

  variables {
    nats = { zones = ["us-central1-a", "us-central1-b", "us-east5-a"] }
  }
  expect_failures = [var.nats]
}

run "no_aggregator" {
  command = plan

  variables {
    aggregators = {}
  }
  expect_failures = [var.aggregators]
}

run "aggregator_without_credentials" {
  command = plan

  variables {
    aggregators = { nobody = { zone = "us-central1-a" } }
  }
  expect_failures = [var.aggregators]
}

run "aggregator_elsewhere" {
  command = plan

  variables {
    aggregators = { aggregator-a = { zone = "us-east5-a" } }
  }
  expect_failures = [var.aggregators]
}

run "learner_with_capitals" {
  command = plan

  variables {
    learners = { Central = { zone = "us-central1-a", kind = "v5p", chips = 4 } }
  }
  expect_failures = [var.learners]
}

run "learner_without_credentials" {
  command = plan

  variables {
    learners = { nobody = { zone = "us-central1-a", kind = "v5p", chips = 4 } }
  }
  expect_failures = [var.learners]
}

run "learner_elsewhere" {
  command = plan

  variables {
    learners = { central = { zone = "us-east5-a", kind = "v6e", chips = 4 } }
  }
  expect_failures = [var.learners]
}

run "unknown_kind" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v4", chips = 4 } }
  }
  expect_failures = [var.learners]
}

run "no_chips" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v5p", chips = 0 } }
  }
  expect_failures = [var.learners]
}

run "more_chips_than_a_host_has" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "tpu7x", chips = 16 } }
  }
  expect_failures = [var.learners]
}

run "chips_and_topology" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v6e", chips = 4, topology = "4x4" } }
  }
  expect_failures = [var.learners]
}

run "neither_chips_nor_topology" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v6e" } }
  }
  expect_failures = [var.learners]
}

run "cpu_without_machine_type" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "cpu" } }
  }
  expect_failures = [var.learners]
}

run "flex_start_for_a_month" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v6e", chips = 4, flex_start_hours = 720 } }
  }
  expect_failures = [var.learners]
}

run "spot_of_flex_start" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v6e", chips = 4, spot = true, flex_start_hours = 24 } }
  }
  expect_failures = [var.learners]
}

run "spot_of_a_reservation" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v6e", chips = 4, spot = true, reservation = "mine" } }
  }
  expect_failures = [var.learners]
}

run "half_a_slice" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v5p", chips = 4, slices = 1.5 } }
  }
  expect_failures = [var.learners]
}

run "no_slices" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v5p", chips = 4, slices = 0 } }
  }
  expect_failures = [var.learners]
}

run "unequal_slices" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v5p", slices = [{ chips = 4 }, { chips = 2 }] } }
  }
  expect_failures = [var.learners]
}

run "slices_of_two_regions" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", zones = ["us-central1-a", "us-east5-a"], kind = "v5p", chips = 4, slices = 2 } }
  }
  expect_failures = [var.learners]
}

run "fewer_zones_than_slices" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", zones = ["us-central1-a", "us-central1-b"], kind = "v5p", chips = 4, slices = 3 } }
  }
  expect_failures = [var.learners]
}

run "zones_of_one_slice" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", zones = ["us-central1-a", "us-central1-b"], kind = "v5p", chips = 4 } }
  }
  expect_failures = [var.learners]
}

run "a_learner_named_like_a_slice_of_another" {
  command = plan

  variables {
    learners = {
      berlin    = { zone = "us-central1-a", kind = "v5p", chips = 4, slices = 2 }
      berlin-s1 = { zone = "us-central1-a", kind = "v5p", chips = 4 }
    }
  }
  expect_failures = [var.learners]
}

run "one_name_for_two" {
  command = plan

  variables {
    learners = { aggregator-a = { zone = "us-central1-a", kind = "v5p", chips = 4 } }
  }
  expect_failures = [var.learners]
}

run "everybody_operates" {
  command = plan

  variables {
    operators = ["allUsers"]
  }
  expect_failures = [var.operators]
}

run "metrics_for_the_internet" {
  command = plan

  variables {
    monitoring_ranges = ["0.0.0.0/0"]
  }
  expect_failures = [var.monitoring_ranges]
}

run "privileged_port" {
  command = plan

  variables {
    metrics_port = 80
  }
  expect_failures = [var.metrics_port]
}

run "metrics_where_machines_answer" {
  command = plan

  variables {
    metrics_port = 9463
  }
  expect_failures = [var.metrics_port]
}

run "metrics_where_supervisors_listen" {
  command = plan

  variables {
    metrics_port = 9466
    learners     = { central = { zone = "us-central1-a", kind = "v5p", chips = 4, slices = 2 } }
  }
  expect_failures = [var.metrics_port]
}

run "a_site_that_its_learner_is_not_named_after" {
  command = plan

  variables {
    learners = { central = { zone = "us-central1-a", kind = "v5p", chips = 4, site = "berlin" } }
  }
  expect_failures = [var.learners]
}

run "a_learner_of_no_site_that_is_named_after_one" {
  command = plan

  variables {
    learners = {
      berlin-1 = { zone = "us-central1-a", kind = "v5p", chips = 4, site = "berlin" }
      berlin-2 = { zone = "us-central1-a", kind = "v5p", chips = 4 }
    }
  }
  expect_failures = [var.learners]
}

run "a_learner_called_watch" {
  command = plan

  variables {
    learners = { watch = { zone = "us-central1-a", kind = "v5p", chips = 4 } }
  }
  expect_failures = [var.learners]
}

run "a_budget_of_nothing" {
  command = plan

  variables {
    budget = { dollars = 0 }
  }
  expect_failures = [var.budget]
}

run "typo_of_a_budget" {
  command = plan

  variables {
    budget = { dollars = 5000, dollar_hour = 3 }
  }
  expect_failures = [var.budget]
}

run "a_budget_with_a_price_of_no_learner" {
  command = plan

  variables {
    budget = { dollars = 5000, learners = { east = 3 } }
  }
  expect_failures = [var.budget]
}

run "a_budget_that_nobody_keeps" {
  command = plan

  variables {
    budget = { dollars = 5000 }
    keeper = false
  }
  expect_failures = [var.budget]
}

run "a_billing_account_of_words" {
  command = plan

  variables {
    budget          = { dollars = 5000 }
    billing_account = "mine"
  }
  expect_failures = [var.billing_account]
}

run "a_webhook_in_quotes" {
  command = plan

  variables {
    webhook_file = "tests/quoted.env"
  }
  expect_failures = [var.webhook_file]
}
