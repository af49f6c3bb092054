# What must hold of every fleet. auth_folder and releases come from the command line: .ci/terraform.

variables {
  project         = "my-project"
  run             = "demo"
  run_toml        = "examples/run.toml"
  bucket_location = "US"
  subnets = {
    us-central1  = "10.64.0.0/20"
    us-east5     = "10.64.16.0/20"
    europe-west4 = "10.64.32.0/20"
  }
  nats = { zones = ["us-central1-a", "us-central1-b", "us-central1-c"] }
  aggregators = {
    aggregator-a = { zone = "us-central1-a" }
    aggregator-b = { zone = "us-east5-a" }
  }
  learners = {
    central = { zone = "us-central1-a", kind = "v5p", chips = 4 }
    east    = { zone = "us-east5-a", kind = "v6e", chips = 8, spot = true }
    europe  = { zone = "europe-west4-b", kind = "v5p", chips = 2, warm_start = true }
    tester  = { zone = "us-central1-b", kind = "cpu", machine_type = "n2-standard-8" }
  }
  operators         = ["user:ann@example.org"]
  monitoring_ranges = ["10.64.0.0/20"]
}

run "network" {
  command = plan

  assert {
    condition     = alltrue([for rule in module.network.firewalls : length(setintersection(coalesce(rule.source_ranges, []), ["0.0.0.0/0", "::/0"])) == 0])
    error_message = "no rule lets the internet in"
  }
  assert {
    condition     = alltrue([for rule in module.network.firewalls : length(coalesce(rule.source_ranges, [])) + length(coalesce(rule.source_tags, [])) > 0])
    error_message = "every rule says whom it lets in"
  }
  assert {
    condition = [for rule in module.network.firewalls : { from = rule.source_tags, to = rule.target_tags }
    if contains(flatten(rule.allow[*].ports), "4222")] == [{ from = toset(["diloco-demo-learner", "diloco-demo-aggregator", "diloco-demo-keeper"]), to = toset(["diloco-demo-nats"]) }]
    error_message = "4222 is open to learners, aggregators and the keeper's watch, and to nobody else"
  }
  assert {
    condition = [for rule in module.network.firewalls : { from = rule.source_tags, to = rule.target_tags }
    if contains(flatten(rule.allow[*].ports), "6222")] == [{ from = toset(["diloco-demo-nats"]), to = toset(["diloco-demo-nats"]) }]
    error_message = "6222 is open between NATS servers, and to nobody else"
  }
  assert {
    condition     = alltrue([for rule in module.network.firewalls : alltrue([for allow in rule.allow : allow.protocol == "tcp" && length(coalesce(allow.ports, [])) == 1])])
    error_message = "every rule opens one port"
  }
  assert {
    condition     = toset(flatten([for rule in module.network.firewalls : flatten(rule.allow[*].ports)])) == toset(["4222", "6222", "22", "9463", "9464"])
    error_message = "no other port is open: not 8222, NATS's monitoring"
  }
  assert {
    condition     = alltrue([for rule in module.network.firewalls : rule.source_ranges == toset(["35.235.240.0/20"]) if contains(flatten(rule.allow[*].ports), "22")])
    error_message = "ssh comes by IAP only"
  }
  assert {
    condition = alltrue([for rule in module.network.firewalls : alltrue([for range in rule.source_ranges : contains(["10.64.0.0/20"], range)])
    if contains(flatten(rule.allow[*].ports), "9464")])
    error_message = "metrics are private: monitoring_ranges"
  }
  assert {
    condition     = [for rule in module.network.firewalls : [rule.source_ranges, rule.target_tags] if contains(flatten(rule.allow[*].ports), "9463")] == [[toset(["35.191.0.0/16", "130.211.0.0/22"]), toset(["diloco-demo-learner"])]]
    error_message = "Google's health checks ask learners' machines, and nobody else does"
  }
  assert {
    condition     = toset(keys(module.network.ways_out)) == toset(keys(var.subnets)) && alltrue([for nat in module.network.ways_out : nat.nat_ip_allocate_option == "AUTO_ONLY"])
    error_message = "each region goes out by Cloud NAT"
  }
  assert {
    condition     = alltrue([for subnet in module.network.subnets : subnet.private_ip_google_access])
    error_message = "Google's services are reached without the internet"
  }
  assert {
    condition = alltrue(concat(
      [for instance in module.nats.instances : length(instance.network_interface[0].access_config) == 0],
      [for aggregator in module.aggregator : length(aggregator.instance.network_interface[0].access_config) == 0],
      [for learner in module.learner : alltrue([for template in learner.templates : length(template.network_interface[0].access_config) == 0])],
    ))
    error_message = "no machine has an address on the internet"
  }
}

run "bucket" {
  command = plan

  assert {
    condition     = alltrue([for bucket in [module.objects.bucket, module.configuration.bucket] : bucket.uniform_bucket_level_access && bucket.public_access_prevention == "enforced" && !bucket.force_destroy])
    error_message = "buckets have uniform access, and are never public"
  }
  assert {
    condition = { for rule in module.objects.bucket.lifecycle_rule : one(rule.condition).age => toset(one(rule.condition).matches_prefix) if one(rule.action).type == "Delete" } == {
      30 = toset([for learner in ["central", "east", "europe", "tester"] : "demo/learner/${learner}/update/"])
      90 = toset([for learner in ["central", "east", "europe", "tester"] : "demo/learner/${learner}/checkpoint/"])
    }
    error_message = "age deletes updates and learners' checkpoints, apart, and nothing of the versions"
  }
  assert {
    condition     = module.objects.bucket.soft_delete_policy[0].retention_duration_seconds == 0
    error_message = "what garbage collection has removed is not billed any longer"
  }
}

run "nats" {
  command = plan

  assert {
    condition     = length(distinct([for instance in module.nats.instances : instance.zone])) == 3
    error_message = "three servers in three zones"
  }
  assert {
    condition     = { for name, instance in module.nats.instances : name => instance.network_interface[0].network_ip } == { nats-1 = "10.64.0.11", nats-2 = "10.64.0.12", nats-3 = "10.64.0.13" }
    error_message = "fixed internal addresses"
  }
  assert {
    condition     = keys(module.nats.disks) == keys(module.nats.instances) && alltrue([for name, disk in module.nats.disks : disk.zone == module.nats.instances[name].zone && module.nats.instances[name].attached_disk[0].device_name == "streams"])
    error_message = "each server has a disk of its own for the streams"
  }
  assert {
    condition     = keys(module.nats.copied) == keys(module.nats.disks) && alltrue([for policy in module.nats.snapshots : policy.snapshot_schedule_policy[0].retention_policy[0].on_source_disk_delete == "KEEP_AUTO_SNAPSHOTS"])
    error_message = "each of these disks is copied, and the copies stay"
  }
  assert {
    condition = alltrue([
      for file in module.nats.configurations : alltrue([
        can(regex("(?s)\ntls \\{[^}]*cert_file[^}]*key_file", file.content)),
        can(regex("(?s)cluster \\{.*tls \\{[^}]*ca_file[^}]*verify: true", file.content)),
        can(regex("(?s)jetstream \\{[^}]*store_dir: \"/var/lib/nats/jetstream/[^}]*max_file_store: [0-9]+[^}]*max_memory_store: [^}]*sync_interval: always", file.content)),
        strcontains(file.content, "http: \"127.0.0.1:8222\""),
        strcontains(file.content, "include \"accounts.conf\""),
      ])
    ])
    error_message = "TLS for clients, certificates for routes, limits, sync_interval: always, monitoring on loopback, accounts"
  }
  assert {
    condition     = strcontains(local.run_toml, "replicas = 3") && strcontains(local.run_toml, "url = \"tls://10.64.0.11:4222,tls://10.64.0.12:4222,tls://10.64.0.13:4222\"")
    error_message = "the run's streams have three replicas, and clients use TLS"
  }
  assert {
    condition     = alltrue([for instance in module.nats.instances : instance.deletion_protection])
    error_message = "no server is removed by mistake"
  }
}

run "secrets" {
  command = plan

  assert {
    condition = alltrue([
      for version in concat(values(module.nats.secrets), [for one in module.aggregator : one.secret], [for one in module.learner : one.secret]) :
      version.secret_data == null && version.secret_data_wo == null && version.secret_data_wo_version > 0
    ])
    error_message = "values are write-only arguments: neither plan nor state has them"
  }
  assert {
    condition = alltrue(flatten([
      for metadata in concat(
        [for instance in module.nats.instances : instance.metadata],
        [for one in module.aggregator : one.instance.metadata],
        [for one in module.learner : one.templates[0].metadata],
        ) : [
        for secret in concat(
          [for name in concat(keys(var.learners), keys(var.aggregators), ["operator"]) : regex("seed = \"(.+)\"", file("${var.auth_folder}/credentials/${name}.toml"))[0]],
          [for server in ["nats-1", "nats-2", "nats-3"] : split("\n", file("${var.auth_folder}/tls/${server}.key"))[1]],
        ) : !strcontains(jsonencode(metadata), secret)
      ]
    ]))
    error_message = "no secret stands in metadata"
  }
  assert {
    condition = alltrue([
      for name, one in module.learner : jsondecode(one.templates[0].metadata["diloco"]).secrets
      == { "/etc/diloco/credentials/${name}.toml" = "projects/my-project/secrets/diloco-demo-${name}-credentials/versions/latest" }
    ])
    error_message = "a learner's machine is told of its own secret, and of no other"
  }
  assert {
    condition     = alltrue([for one in module.aggregator : keys(jsondecode(one.instance.metadata["diloco"]).secrets) == ["/etc/diloco/credentials/aggregator.toml"]])
    error_message = "the operator's credentials stay with the operator, unless hourly_checkpoints says otherwise"
  }
}

run "learners_rights" {
  command = plan

  assert {
    condition = alltrue([
      for name, one in module.identity : { for binding in one.bindings : binding.role => binding.condition[0].expression if binding.bucket == "my-project-demo-diloco" && startswith(binding.role, "roles/") } == {
        "roles/storage.objectCreator" = "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/learner/${name}/')"
        "roles/storage.objectViewer" = name == "europe" ? join(" || ", [
          "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/global/')",
          "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/learner/')",
          "api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('demo/learner/')",
          ]) : join(" || ", [
          "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/global/')",
          "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/learner/${name}/')",
          "api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('demo/learner/${name}/')",
        ])
      }
    ])
    error_message = "a learner creates below its own prefix, reads versions and its own, and lists its own; warm_start reads all learners'"
  }
  assert {
    condition     = google_project_iam_custom_role.deleter.permissions == toset(["storage.objects.delete"])
    error_message = "the right to delete comes alone"
  }
  assert {
    condition     = alltrue([for name, one in module.identity : [for binding in one.bindings : binding.condition[0].expression if binding.condition[0].title == "delete its own checkpoints"] == ["resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/learner/${name}/checkpoint/')"]])
    error_message = "a learner deletes its own checkpoints, and so cannot overwrite an update"
  }
  assert {
    condition = alltrue(flatten([
      for one in concat(values(module.identity), values(module.aggregator)) : [for binding in one.bindings : length(binding.condition) == 1 && length(binding.condition[0].expression) > 0]
    ]))
    error_message = "no right on a bucket is without its condition"
  }
  assert {
    condition     = alltrue([for binding in module.nats.bindings : binding.bucket == "my-project-demo-diloco-config" && binding.role == "roles/storage.objectViewer"])
    error_message = "NATS servers read their configuration, and have no right on the run's objects"
  }
  assert {
    condition = alltrue([for one in module.aggregator : [for binding in one.bindings : binding.condition[0].expression if binding.role == "roles/storage.objectCreator"] == [join(" || ", [
      "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/global/')",
      "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/checkpoint/')",
    ])]])
    error_message = "an aggregator creates versions and the run's checkpoints, and no updates"
  }
}

run "sites" {
  command = plan

  variables {
    learners = {
      central  = { zone = "us-central1-a", kind = "v5p", chips = 4 }
      berlin-1 = { zone = "europe-west4-b", kind = "cpu", machine_type = "n2-standard-8", site = "berlin" }
      berlin-2 = { zone = "europe-west4-b", kind = "cpu", machine_type = "n2-standard-8", site = "berlin" }
    }
  }
  assert {
    condition     = toset(keys(module.identity)) == toset(["central", "berlin"])
    error_message = "learners of a site share one account"
  }
  assert {
    condition = { for binding in module.identity["berlin"].bindings : binding.role => binding.condition[0].expression if binding.bucket == "my-project-demo-diloco" && startswith(binding.role, "roles/") } == {
      "roles/storage.objectCreator" = "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/learner/berlin-')"
      "roles/storage.objectViewer" = join(" || ", [
        "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/global/')",
        "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/learner/berlin-')",
        "api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('demo/learner/berlin-')",
      ])
    }
    error_message = "it may do what its learners may, below their common prefix"
  }
  assert {
    condition     = [for binding in module.identity["berlin"].bindings : binding.condition[0].expression if binding.condition[0].title == "delete its own checkpoints"] == ["resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/learner/berlin-') && resource.name.extract('projects/_/buckets/my-project-demo-diloco/objects/demo/learner/berlin-{learner}/checkpoint/') != ''"]
    error_message = "and delete checkpoints, and no updates"
  }
  assert {
    condition     = { for name, one in module.learner : name => keys(jsondecode(one.templates[0].metadata["diloco"]).secrets) } == { for name, one in module.learner : name => ["/etc/diloco/credentials/${name}.toml"] }
    error_message = "each machine is told of its own learner's credentials"
  }
}

run "machines" {
  command = plan

  assert {
    condition     = { for name, one in module.learner : name => one.templates[0].machine_type } == { central = "ct5p-hightpu-4t", east = "ct6e-standard-8t", europe = "ct5p-hightpu-2t", tester = "n2-standard-8" }
    error_message = "kinds are mixed in one run"
  }
  assert {
    condition     = { for name, one in module.learner : name => one.templates[0].scheduling[0].provisioning_model } == { central = "STANDARD", east = "SPOT", europe = "STANDARD", tester = "STANDARD" }
    error_message = "spot or not, for each learner"
  }
  assert {
    condition = alltrue([
      for one in module.learner : one.groups[0].target_size == 1
      && one.groups[0].instance_lifecycle_policy[0].default_action_on_failure == "REPAIR"
      && length(one.groups[0].auto_healing_policies) == 1
      && one.groups[0].update_policy[0].type == "OPPORTUNISTIC" && one.groups[0].update_policy[0].max_surge_fixed == 0
    ])
    error_message = "a group keeps one machine of each learner, never two, and an apply stops none"
  }
  assert {
    condition = alltrue([
      for metadata in concat(
        [for instance in module.nats.instances : instance.metadata],
        [for one in module.aggregator : one.instance.metadata],
        [for one in module.learner : one.templates[0].metadata],
      ) : metadata["enable-oslogin"] == "TRUE" && metadata["block-project-ssh-keys"] == "TRUE" && metadata["serial-port-enable"] == "FALSE"
    ])
    error_message = "people are who IAM says, and come by no other way"
  }
  assert {
    condition     = [for name, one in module.aggregator : jsondecode(one.instance.metadata["diloco"]).units] == [["diloco-aggregator.service", "diloco-gc.timer"], ["diloco-aggregator.service"]]
    error_message = "two aggregators, of which one collects what no aggregator knows of"
  }
}

run "updates" {
  command = plan

  assert {
    condition     = alltrue([for one in module.learner : one.groups[0].update_policy[0].minimal_action == "REFRESH" && one.groups[0].update_policy[0].most_disruptive_allowed_action == "REFRESH"])
    error_message = "a new release deletes no machine"
  }
  assert {
    condition     = alltrue(concat([for instance in module.nats.instances : instance.allow_stopping_for_update], [for one in module.aggregator : one.instance.allow_stopping_for_update]))
    error_message = "machines can be made larger"
  }
  assert {
    condition     = toset([for kind, release in google_storage_bucket_object.release : kind]) == toset(["cpu", "tpu"])
    error_message = "each kind of machine has its release"
  }
  assert {
    condition = { for name, one in module.learner : name => jsondecode(one.templates[0].metadata["diloco"]).kind } == {
      central = "tpu", east = "tpu", europe = "tpu", tester = "cpu"
    }
    error_message = "and is told of it"
  }
}

run "logs" {
  command = plan

  assert {
    condition = alltrue(flatten([
      [for one in module.identity : one.logs.role == "roles/logging.logWriter"],
      [for one in module.aggregator : one.logs.role == "roles/logging.logWriter"],
      [for one in module.nats.logs : one.role == "roles/logging.logWriter"],
      module.keeper[0].logs.role == "roles/logging.logWriter",
    ]))
    error_message = "each machine may write logs, and read none"
  }
}

run "keeper" {
  command = plan

  assert {
    condition     = module.keeper[0].role.permissions == toset(["compute.instanceGroupManagers.get", "compute.instanceGroupManagers.update", "compute.instances.get", "compute.instances.getGuestAttributes"])
    error_message = "it looks, and resizes"
  }
  assert {
    condition     = module.keeper[0].binding.condition[0].expression == "resource.name.extract('/instanceGroupManagers/{name}').startsWith('diloco-demo-') || resource.name.extract('/instances/{name}').startsWith('diloco-demo-')"
    error_message = "the groups and machines of this run, and no others"
  }
  assert {
    condition = { for group in jsondecode(module.keeper[0].instance.metadata["diloco"]).groups : group.name => [group.zone, group.hosts, group.ours] } == {
      diloco-demo-central = ["us-central1-a", 1, false], diloco-demo-east = ["us-east5-a", 1, false]
      diloco-demo-europe  = ["europe-west4-b", 1, false], diloco-demo-tester = ["us-central1-b", 1, false]
    }
    error_message = "it is told of each group"
  }
  assert {
    condition     = length(module.keeper[0].instance.network_interface[0].access_config) == 0
    error_message = "it has no address on the internet"
  }
  assert {
    condition     = alltrue([for one in module.learner : one.templates[0].metadata["enable-guest-attributes"] == "TRUE"])
    error_message = "machines of learners can say that their run has ended"
  }
}

run "watch" {
  command = plan

  variables {
    webhook_file = "tests/webhook.env"
  }
  assert {
    condition     = jsondecode(module.keeper[0].instance.metadata["diloco"]).units == ["diloco-watch.service"] && contains(keys(jsondecode(module.keeper[0].instance.metadata["diloco"]).files), "/etc/diloco/run.toml")
    error_message = "the run is watched"
  }
  assert {
    condition     = jsondecode(module.keeper[0].instance.metadata["diloco"]).secrets == { "/etc/diloco/credentials/watch.toml" = "projects/my-project/secrets/diloco-demo-keeper-credentials/versions/latest", "/etc/diloco/watch.env" = "projects/my-project/secrets/diloco-demo-keeper-webhook/versions/latest" }
    error_message = "with a reader's key, and the webhook, from Secret Manager"
  }
  assert {
    condition = { for one in module.keeper[0].reads : one.bucket => [one.role, one.condition[0].expression] } == {
      my-project-demo-diloco        = ["roles/storage.objectViewer", "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/') || api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('demo/')"]
      my-project-demo-diloco-config = ["roles/storage.objectViewer", "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco-config/objects/common/')"]
    }
    error_message = "it reads the run and the configuration, and writes nothing"
  }
}

run "budget" {
  command = plan

  variables {
    budget                = { dollars = 5000.5, dollars_hour = 3.5, learners = { central = 16.8 }, uncounted = ["east: 8 chips of v6e, spot"] }
    billing_account       = "012345-6789AB-CDEF01"
    notification_channels = ["projects/my-project/notificationChannels/1"]
  }
  assert {
    condition     = jsondecode(module.keeper[0].instance.metadata["diloco"]).budget == { dollars = 5000.5, dollars_hour = 3.5, uncounted = ["east: 8 chips of v6e, spot"] }
    error_message = "the keeper is told what may be spent"
  }
  assert {
    condition     = { for group in jsondecode(module.keeper[0].instance.metadata["diloco"]).groups : group.name => group.dollars_hour if group.dollars_hour > 0 } == { diloco-demo-central = 16.8 }
    error_message = "and what a machine costs, where that is known"
  }
  assert {
    condition     = google_billing_budget.this[0].amount[0].specified_amount[0].units == "5001" && google_billing_budget.this[0].budget_filter[0].projects == toset(["projects/my-project"]) && toset(google_billing_budget.this[0].threshold_rules[*].threshold_percent) == toset([0.5, 0.9, 1])
    error_message = "Google tells people of the project's dollars"
  }
  assert {
    condition     = toset(google_billing_budget.this[0].all_updates_rule[0].monitoring_notification_channels) == toset(var.notification_channels) && contains(keys(google_project_service.this), "billingbudgets.googleapis.com")
    error_message = "the run's channels, too"
  }
}

run "caches" {
  command = plan

  variables {
    caches = ["us-east5-a"]
  }
  assert {
    condition     = module.cache["us-east5"].read.role == "roles/storage.objectViewer" && module.cache["us-east5"].read.condition[0].expression == "resource.name.startsWith('projects/_/buckets/my-project-demo-diloco/objects/demo/global/')"
    error_message = "a cache reads what every learner of the run may read, and nothing else"
  }
  assert {
    condition = [for rule in module.network.firewalls : { from = rule.source_tags, to = rule.target_tags }
    if contains(flatten(rule.allow[*].ports), "9465")] == [{ from = toset(["diloco-demo-learner"]), to = toset(["diloco-demo-cache"]) }]
    error_message = "9465 is open to learners, and to nobody else"
  }
  assert {
    condition     = module.cache["us-east5"].instance.network_interface[0].network_ip == "10.64.16.10" && length(module.cache["us-east5"].instance.network_interface[0].access_config) == 0
    error_message = "it has a fixed address, and none on the internet"
  }
  assert {
    condition = { for name, one in module.learner : name => try(jsondecode(one.templates[0].metadata["diloco"]).environment.DILOCO_STORE_CACHE, "none") } == {
      central = "none", east = "http://10.64.16.10:9465", europe = "none", tester = "none"
    }
    error_message = "the learners of its region are told of it, and no others"
  }
  assert {
    condition     = strcontains(module.cache["us-east5"].nginx.content, "proxy_pass https://storage.googleapis.com/my-project-demo-diloco/demo/global/;") && !can(regex("[$][{]", module.cache["us-east5"].nginx.content))
    error_message = "nginx is told of the run's versions alone"
  }
}

run "a_stop_and_alerts" {
  command = plan

  variables {
    stop_at               = "2126-12-24T00:00:00Z"
    notification_channels = ["projects/my-project/notificationChannels/1"]
  }
  assert {
    condition     = jsondecode(module.keeper[0].instance.metadata["diloco"]).stop_at == "2126-12-24T00:00:00Z"
    error_message = "the keeper is told when to stop"
  }
  assert {
    condition     = google_monitoring_alert_policy.errors[0].conditions[0].condition_matched_log[0].filter == "logName=\"projects/my-project/logs/diloco\" AND severity>=ERROR AND labels.machine=~\"^diloco-demo-\""
    error_message = "channels hear of errors of this run's machines"
  }
}

run "prometheus" {
  command = plan

  assert {
    condition     = length(google_billing_budget.this) == 0 && jsondecode(module.keeper[0].instance.metadata["diloco"]).budget == null && !contains(keys(jsondecode(module.keeper[0].instance.metadata["diloco"]).secrets), "/etc/diloco/watch.env")
    error_message = "there is no budget, and no webhook"
  }
  assert {
    condition     = length(google_monitoring_alert_policy.errors) == 0 && jsondecode(module.keeper[0].instance.metadata["diloco"]).stop_at == ""
    error_message = "nobody is told, and nothing stops"
  }
  assert {
    condition = { for job in yamldecode(output.prometheus).scrape_configs : job.job_name => job.gce_sd_configs[*].zone } == {
      diloco-aggregators = ["us-central1-a", "us-east5-a"]
      diloco-learners    = ["europe-west4-b", "us-central1-a", "us-central1-b", "us-east5-a"]
    }
    error_message = "each zone is searched for machines"
  }
  assert {
    condition     = yamldecode(output.prometheus).scrape_configs[1].relabel_configs[0].regex == ".*,diloco-demo-learner,.*" && yamldecode(output.prometheus).rule_files == ["alerts.yml"]
    error_message = "those of the run are kept, with the alerts of the repository"
  }
}

run "without_a_keeper" {
  command = plan

  variables {
    keeper = false
  }
  assert {
    condition     = length(module.keeper) == 0
    error_message = "nobody has rights on machines"
  }
}

run "operators" {
  command = plan

  assert {
    condition     = alltrue([for one in google_project_iam_member.operator_login : one.condition[0].expression == "resource.name.extract('/instances/{name}').startsWith('diloco-demo-')"])
    error_message = "operators are root on machines of this run, and not of the project"
  }
}

run "health" {
  command = plan

  assert {
    condition     = alltrue([for one in module.learner : one.health_check.http_health_check[0].request_path == "/livez" && one.health_check.http_health_check[0].port == 9463])
    error_message = "a machine is made anew only if it is itself broken, whatever its learner does"
  }
}

run "one_is_paused" {
  command = plan

  variables {
    learners = {
      central = { zone = "us-central1-a", kind = "v5p", chips = 4 }
      slice   = { zone = "us-east5-a", kind = "v6e", topology = "4x8", paused = true }
    }
  }
  assert {
    condition     = { for name, one in module.learner : name => one.groups[0].target_size } == { central = 1, slice = 0 }
    error_message = "it has no machines, the other keeps its own"
  }
}

run "all_are_paused" {
  command = plan

  variables {
    paused = true
  }
  assert {
    condition     = alltrue([for one in module.learner : one.groups[0].target_size == 0])
    error_message = "no learner has machines"
  }
  assert {
    condition     = length(module.nats.instances) == 3 && length(module.aggregator) == 2 && length(module.learner) == 4
    error_message = "all else stays"
  }
}

run "without_learners" {
  command = plan

  variables {
    learners = {}
  }
  assert {
    condition     = length([for rule in module.objects.bucket.lifecycle_rule : rule if one(rule.action).type == "Delete"]) == 0
    error_message = "age deletes nothing where no learner's prefix is named: a rule without one would be for every object"
  }
}

run "checkpoints" {
  command = plan

  variables {
    hourly_checkpoints = true
  }
  assert {
    condition     = [for name, one in module.aggregator : contains(keys(jsondecode(one.instance.metadata["diloco"]).secrets), "/etc/diloco/credentials/operator.toml")] == [true, false]
    error_message = "one machine gets the operator's credentials"
  }
  assert {
    condition     = contains(jsondecode(module.aggregator["aggregator-a"].instance.metadata["diloco"]).units, "diloco-checkpoint.timer")
    error_message = "and the timer"
  }
}

run "slice" {
  command = plan

  variables {
    learners = {
      slice = { zone = "us-east5-a", kind = "v6e", topology = "4x8", spot = true }
    }
  }
  assert {
    condition     = module.learner["slice"].groups[0].target_size == 8 && module.learner["slice"].templates[0].machine_type == "ct6e-standard-4t"
    error_message = "32 chips are 8 hosts of 4"
  }
  assert {
    condition     = module.learner["slice"].workload_policies[0].accelerator_topology == "4x8" && length(module.learner["slice"].groups[0].auto_healing_policies) == 0
    error_message = "the hosts of a slice come and go together"
  }
  assert {
    condition     = module.learner["slice"].groups[0].target_size_policy[0].mode == "BULK" && module.learner["slice"].groups[0].instance_lifecycle_policy[0].default_action_on_failure == "DO_NOTHING" && module.learner["slice"].bulk
    error_message = "all at once, and the keeper makes them anew"
  }
  assert {
    condition     = jsondecode(module.learner["slice"].templates[0].metadata["diloco"]).environment == { DILOCO_LEARNER_COORDINATOR = "auto", DILOCO_LEARNER_CHECKPOINT_UPLOAD = "true" }
    error_message = "they find each other by what the platform knows of the slice, and a new disk is empty"
  }
  assert {
    condition     = length(module.learner["slice"].slice_firewall.source_service_accounts) == 1 && length(module.learner["slice"].slice_firewall.target_service_accounts) == 1 && flatten(module.learner["slice"].slice_firewall.allow[*].ports) == ["8470-8490", "32768-60999"]
    error_message = "they speak to each other, and to no other learner's hosts"
  }
}

run "slices_of_a_learner" {
  command = plan

  variables {
    learners = {
      central = { zone = "us-central1-a", kind = "v5p", chips = 4 }
      big     = { zone = "us-east5-a", kind = "v6e", topology = "4x4", spot = true, slices = 3 }
      spread  = { zone = "us-east5-a", zones = ["us-east5-a", "us-east5-b"], kind = "cpu", machine_type = "n2-standard-8", spot = true, slices = 2 }
    }
    budget = { dollars = 5000, learners = { big = 10.8 } }
  }
  assert {
    condition     = [for group in module.learner["big"].groups : [group.name, group.zone, group.target_size]] == [["diloco-demo-big-s0", "us-east5-a", 4], ["diloco-demo-big-s1", "us-east5-a", 4], ["diloco-demo-big-s2", "us-east5-a", 4]]
    error_message = "each slice is a group of its own, which comes back alone"
  }
  assert {
    condition     = module.learner["big"].workload_policies[*].accelerator_topology == ["4x4", "4x4", "4x4"] && alltrue([for group in module.learner["big"].groups : group.target_size_policy[0].mode == "BULK"])
    error_message = "whose hosts come all at once"
  }
  assert {
    condition     = module.learner["spread"].groups[*].zone == ["us-east5-a", "us-east5-b"] && alltrue([for group in module.learner["spread"].groups : length(group.auto_healing_policies) == 1])
    error_message = "slices of one region may be of several zones; Google mends those of one machine"
  }
  assert {
    condition     = alltrue([for template in concat(module.learner["big"].templates, module.learner["spread"].templates) : template.scheduling[0].provisioning_model == "SPOT" && template.name_prefix != null])
    error_message = "all of spot"
  }
  assert {
    condition = { for group in jsondecode(module.keeper[0].instance.metadata["diloco"]).groups : group.name => [group.zone, group.hosts, group.ours, group.dollars_hour] } == {
      diloco-demo-central   = ["us-central1-a", 1, false, 0]
      diloco-demo-big-s0    = ["us-east5-a", 4, true, 10.8], diloco-demo-big-s1 = ["us-east5-a", 4, true, 10.8], diloco-demo-big-s2 = ["us-east5-a", 4, true, 10.8]
      diloco-demo-spread-s0 = ["us-east5-a", 1, false, 0], diloco-demo-spread-s1 = ["us-east5-b", 1, false, 0]
    }
    error_message = "the keeper mends, counts and ends each slice by itself"
  }
  assert {
    condition = [for template in module.learner["spread"].templates : jsondecode(template.metadata["diloco"]).slice] == [
      for slice in [0, 1] : { number = slice, hosts = 1, names = "projects/my-project/managedZones/diloco-demo-spread" }
    ]
    error_message = "each host is told which slice it is of"
  }
  assert {
    condition = alltrue([for template in module.learner["spread"].templates : jsondecode(template.metadata["diloco"]).environment == {
      DILOCO_LEARNER_CHECKPOINT_UPLOAD = "true"
      DILOCO_LEARNER_SLICES            = "2"
      DILOCO_LEARNER_PEERS             = "s0-h0.spread.demo.diloco.internal:9466,s1-h0.spread.demo.diloco.internal:9466"
    }])
    error_message = "and where all others are, by names that stay; the supervisors say who is JAX's coordinator"
  }
  assert {
    condition     = length(split(",", jsondecode(module.learner["big"].templates[2].metadata["diloco"]).environment.DILOCO_LEARNER_PEERS)) == 12 && split(",", jsondecode(module.learner["big"].templates[2].metadata["diloco"]).environment.DILOCO_LEARNER_PEERS)[6] == "s1-h2.big.demo.diloco.internal:9466"
    error_message = "slice by slice, as learner.peers wants them"
  }
  assert {
    condition     = module.learner["big"].names.zone.visibility == "private" && module.learner["big"].names.zone.dns_name == "big.demo.diloco.internal." && length(module.learner["big"].names.records) == 12 && alltrue([for record in module.learner["big"].names.records : record.ttl == 5 && record.type == "A"])
    error_message = "the names are there from the beginning, and nobody remembers an old address for long"
  }
  assert {
    condition     = module.learner["big"].names.change.managed_zone == "diloco-demo-big" && module.learner["big"].names.change.role == "projects/my-project/roles/diloco_demo_names" && google_project_iam_custom_role.names[0].permissions == toset(["dns.changes.create", "dns.resourceRecordSets.get", "dns.resourceRecordSets.update"])
    error_message = "a learner's machines change the addresses of their own names, and make none"
  }
  assert {
    condition     = flatten(module.learner["big"].slice_firewall.allow[*].ports) == ["8470-8490", "32768-60999", "8081", "9466"] && length(module.learner["big"].slice_firewall.source_service_accounts) == 1 && module.learner["spread"].slice_firewall != null && module.learner["central"].slice_firewall == null
    error_message = "supervisors, JAX's coordinator and libtpu between the slices of a learner, and from nobody else"
  }
  assert {
    condition     = module.learner["central"].names.zone == null && !contains(keys(jsondecode(module.learner["central"].templates[0].metadata["diloco"])), "slice") && contains(keys(google_project_service.this), "dns.googleapis.com")
    error_message = "a learner of one slice has no names"
  }
  assert {
    condition     = output.machines["big/2"] == { zone = "us-east5-a", group = "diloco-demo-big-s2" } && output.machines["central"].group == "diloco-demo-central" && yamldecode(output.prometheus).scrape_configs[1].gce_sd_configs[*].zone == ["us-central1-a", "us-east5-a", "us-east5-b"]
    error_message = "operators and Prometheus find each slice"
  }
}

run "a_learner_of_several_slices_is_paused" {
  command = plan

  variables {
    learners = {
      big = { zone = "us-east5-a", kind = "v6e", topology = "4x4", slices = 2, paused = true }
    }
  }
  assert {
    condition     = module.learner["big"].groups[*].target_size == [0, 0]
    error_message = "none of its slices has machines"
  }
}

run "flex_start" {
  command = plan

  variables {
    learners = {
      slice = { zone = "us-central1-ai1a", kind = "v5p", topology = "2x2x2", flex_start_hours = 48 }
    }
  }
  assert {
    condition     = module.learner["slice"].templates[0].scheduling[0].provisioning_model == "FLEX_START" && module.learner["slice"].templates[0].scheduling[0].max_run_duration[0].seconds == 172800 && module.learner["slice"].templates[0].scheduling[0].instance_termination_action == "DELETE" && !module.learner["slice"].templates[0].scheduling[0].automatic_restart
    error_message = "for so long, and no longer"
  }
  assert {
    condition     = module.learner["slice"].templates[0].reservation_affinity[0].type == "NO_RESERVATION" && module.learner["slice"].groups[0].instance_lifecycle_policy[0].default_action_on_failure == "DO_NOTHING"
    error_message = "of no reservation, and not repaired by Google"
  }
}

run "data" {
  command = plan

  variables {
    data = "gs://my-data/of/tokens"
  }
  assert {
    condition     = jsondecode(module.learner["east"].templates[0].metadata["diloco"]).data == "gs://my-data/of/tokens"
    error_message = "machines are told where the data is"
  }
  assert {
    condition     = alltrue([for one in module.identity : one.data[0].bucket == "my-data" && one.data[0].condition[0].expression == "resource.name.startsWith('projects/_/buckets/my-data/objects/of/tokens/')"])
    error_message = "and may read it, and nothing else of that bucket"
  }
}

run "one_host" {
  command = plan

  assert {
    condition     = alltrue([for learner in module.learner : learner.slice_firewall == null && !contains(keys(jsondecode(learner.templates[0].metadata["diloco"]).environment), "DILOCO_LEARNER_COORDINATOR")])
    error_message = "a learner of one host waits for no other"
  }
}
