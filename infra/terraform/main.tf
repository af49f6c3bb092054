# A run's network, buckets, NATS servers, aggregators and learners. docs/provision.md has the steps.

locals {
  name = "diloco-${var.run}"
  tags = {
    nats       = "${local.name}-nats"
    aggregator = "${local.name}-aggregator"
    learner    = "${local.name}-learner"
    keeper     = "${local.name}-keeper"
    cache      = "${local.name}-cache"
  }
  labels = merge(var.labels, { diloco-run = var.run })

  # What is not given. The variables have no types of their own, which would drop unknown keys.
  nats_given = {
    machine_type  = try(coalesce(var.nats.machine_type), "e2-standard-2")
    disk_gib      = try(coalesce(var.nats.disk_gib), 50)
    snapshot_days = try(coalesce(var.nats.snapshot_days), 7)
  }
  aggregators = {
    for name, one in var.aggregators : name => {
      zone         = one.zone
      machine_type = try(coalesce(one.machine_type), "n2-highmem-8")
      disk_gib     = try(coalesce(one.disk_gib), 50)
    }
  }
  learners = {
    for name, one in var.learners : name => {
      zone         = one.zone
      zones        = try(length(one.zones), 0) > 0 ? tolist(one.zones) : [for _ in range(try(coalesce(one.slices), 1)) : one.zone]
      kind         = one.kind
      chips        = try(one.chips, null)
      topology     = try(one.topology, null)
      machine_type = try(one.machine_type, null)
      spot         = try(coalesce(one.spot), false)
      reservation  = try(one.reservation, null)

      flex_start_hours = try(one.flex_start_hours, null)
      image            = try(coalesce(one.image), local.images[one.kind])
      disk_gib         = try(coalesce(one.disk_gib), 100)
      warm_start       = try(coalesce(one.warm_start), false)
      paused           = try(coalesce(one.paused), false)
      site             = try(one.site, null)
    }
  }
  # An account for each learner, or for all of a site: docs/security.md says what that means.
  identities = merge(
    { for name, one in local.learners : name => { site = false, warm_start = one.warm_start } if one.site == null },
    {
      for site in distinct(compact([for one in local.learners : one.site])) : site => {
        site       = true
        warm_start = anytrue([for one in local.learners : one.warm_start if one.site == site])
      }
    },
  )
  images = merge({
    v5p   = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
    v6e   = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
    tpu7x = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accel-2404-amd64-tpu-tpu7x"
    cpu   = "projects/debian-cloud/global/images/family/debian-12"
  }, { for kind, image in var.images : kind => image if image != null })

  # Beside the first aggregator: no byte that one reads crosses regions, and none is stored twice.
  first_aggregator = sort(keys(var.aggregators))[0]
  bucket_location  = coalesce(var.bucket_location, regex("^(.*)-(?:ai[0-9])?[a-z]$", local.aggregators[local.first_aggregator].zone)[0])

  # Addresses follow from the ranges, so that diloco auth can be told them before anything is made.
  nats_regions   = [for zone in var.nats.zones : regex("^(.*)-(?:ai[0-9])?[a-z]$", zone)[0]]
  nats_addresses = [for index, region in local.nats_regions : cidrhost(var.subnets[region], 11 + index)]

  digests = { for kind, path in var.releases : kind => filesha256(path) }
  startup_script = templatefile("${path.module}/startup.py.tftpl", {
    files = { for name in ["boot.py", "install_release.py", "google_units.py", "livez.py", "cloud.py", "logs.py", "keeper.py", "ended.py", "cache.py"] : name => file("${path.module}/../${name}") }
  })
  livez_port = 9463 # as infra/livez.py has it
  # At which the supervisors of a learner of several slices find each other.
  supervisor_port = 9466
  several         = anytrue([for one in local.learners : length(one.zones) > 1])

  # NATS servers have the addresses from 11 on.
  cache_port = 9465
  caches = {
    for zone in var.caches : regex("^(.*)-(?:ai[0-9])?[a-z]$", zone)[0] => {
      zone    = zone
      address = cidrhost(var.subnets[regex("^(.*)-(?:ai[0-9])?[a-z]$", zone)[0]], 10)
    }
  }

  # By the kind of the release that a machine runs.
  boot = {
    for kind, digest in local.digests : kind => {
      bucket  = module.configuration.name
      kind    = kind
      release = { object = google_storage_bucket_object.release[kind].name, sha256 = digest }
    }
  }

  deleter_role = "projects/${var.project}/roles/${google_project_iam_custom_role.deleter.role_id}"

  # On aggregators and learners.
  files = {
    "/etc/diloco/run.toml" = google_storage_bucket_object.run.name
    "/etc/diloco/ca.pem"   = google_storage_bucket_object.authority.name
  }

  # What APIs are for.
  services = concat([
    "cloudresourcemanager.googleapis.com", "compute.googleapis.com", "iam.googleapis.com",
    "iap.googleapis.com", "logging.googleapis.com", "monitoring.googleapis.com", "oslogin.googleapis.com",
    "secretmanager.googleapis.com", "storage.googleapis.com", "tpu.googleapis.com",
  ], local.several ? ["dns.googleapis.com"] : [], var.billing_account == null ? [] : ["billingbudgets.googleapis.com"])

  store_url = "gs://${module.objects.name}"
  run_toml  = <<-EOT
    ${trimspace(file(var.run_toml))}

    # By Terraform:
    [bus]
    url = "${join(",", [for address in local.nats_addresses : "tls://${address}:4222"])}"
    tls_ca = "/etc/diloco/ca.pem"
    replicas = 3

    [store]
    url = "${local.store_url}"

    [metrics]
    listen = "0.0.0.0"  # of a private network, whose firewall says who may ask
    port = ${var.metrics_port}
  EOT

  accounts = merge(
    module.nats.service_accounts,
    { for name, aggregator in module.aggregator : name => aggregator.service_account },
    { for name, identity in module.identity : name => identity.account.name },
    var.keeper ? { keeper = module.keeper[0].service_account } : {},
    { for region, cache in module.cache : "cache-${region}" => cache.service_account },
  )
  machines = concat(["nats-1", "nats-2", "nats-3"], keys(var.aggregators), keys(local.identities), var.keeper ? ["keeper"] : [], [for region in keys(local.caches) : "cache-${region}"])
}

resource "google_project_service" "this" {
  for_each           = toset(local.services)
  service            = each.key
  disable_on_destroy = false
}

module "network" {
  source            = "./modules/network"
  name              = local.name
  subnets           = var.subnets
  tags              = local.tags
  metrics_port      = var.metrics_port
  livez_port        = local.livez_port
  cache_port        = length(var.caches) > 0 ? local.cache_port : null
  monitoring_ranges = var.monitoring_ranges

  depends_on = [google_project_service.this]
}

# The run's objects. Updates come and go with every round; deleted ones are not kept, because they
# would be billed for days, at many times the size of what is alive. Versions and the run's checkpoints
# have no age at which they may go: a paused run has nothing else.
module "objects" {
  source           = "./modules/bucket"
  name             = "${var.project}-${var.run}-diloco"
  location         = local.bucket_location
  soft_delete_days = 0
  labels           = local.labels
  # A rule has at most 50 prefixes.
  backstops = merge([
    for index, names in chunklist(keys(var.learners), 50) : {
      "updates-${index}" = {
        days     = try(var.bucket_backstop_days.updates, 30)
        prefixes = [for learner in names : "${var.run}/learner/${learner}/update/"]
      }
      "checkpoints-${index}" = {
        days     = try(var.bucket_backstop_days.checkpoints, 90)
        prefixes = [for learner in names : "${var.run}/learner/${learner}/checkpoint/"]
      }
    }
  ]...)

  depends_on = [google_project_service.this]
}

# The release and what machines are configured with; no secrets.
module "configuration" {
  source           = "./modules/bucket"
  name             = "${var.project}-${var.run}-diloco-config"
  location         = local.bucket_location
  soft_delete_days = 7
  labels           = local.labels

  depends_on = [google_project_service.this]
}

resource "google_storage_bucket_object" "release" {
  for_each = local.digests
  name     = "common/diloco-${each.key}-${substr(each.value, 0, 16)}.tar.gz"
  bucket   = module.configuration.name
  source   = var.releases[each.key]
}

resource "google_storage_bucket_object" "run" {
  name    = "common/run.toml"
  bucket  = module.configuration.name
  content = local.run_toml
}

resource "google_storage_bucket_object" "authority" {
  name    = "common/ca.pem"
  bucket  = module.configuration.name
  content = file("${var.auth_folder}/tls/ca.pem")
}

# To delete and nothing else: with the right to create it would be one to overwrite.
resource "google_project_iam_custom_role" "deleter" {
  role_id     = "diloco_${replace(var.run, "-", "_")}_deleter"
  title       = "diloco ${var.run}: delete objects"
  permissions = ["storage.objects.delete"]

  depends_on = [google_project_service.this]
}

# For the names of the hosts of a learner of several slices, in the DNS zone of that learner.
resource "google_project_iam_custom_role" "names" {
  count       = local.several ? 1 : 0
  role_id     = "diloco_${replace(var.run, "-", "_")}_names"
  title       = "diloco ${var.run}: change addresses of names"
  permissions = ["dns.changes.create", "dns.resourceRecordSets.get", "dns.resourceRecordSets.update"]

  depends_on = [google_project_service.this]
}

module "nats" {
  source         = "./modules/nats"
  project        = var.project
  run            = var.run
  zones          = var.nats.zones
  addresses      = local.nats_addresses
  machine_type   = local.nats_given.machine_type
  image          = local.images.cpu
  disk_gib       = local.nats_given.disk_gib
  snapshot_days  = local.nats_given.snapshot_days
  auth_folder    = var.auth_folder
  subnetworks    = module.network.subnetworks
  tag            = local.tags.nats
  startup_script = local.startup_script
  boot           = local.boot["cpu"]
  authority      = google_storage_bucket_object.authority.name
  labels         = local.labels
}

module "aggregator" {
  source         = "./modules/aggregator"
  project        = var.project
  for_each       = local.aggregators
  run            = var.run
  name           = each.key
  zone           = each.value.zone
  machine_type   = each.value.machine_type
  image          = local.images.cpu
  disk_gib       = each.value.disk_gib
  bucket         = module.objects.name
  deleter_role   = local.deleter_role
  auth_folder    = var.auth_folder
  chores         = each.key == local.first_aggregator
  checkpoints    = var.hourly_checkpoints
  subnetwork     = module.network.subnetworks[regex("^(.*)-(?:ai[0-9])?[a-z]$", each.value.zone)[0]]
  tag            = local.tags.aggregator
  startup_script = local.startup_script
  boot           = local.boot["cpu"]
  files          = local.files
  labels         = local.labels
}

module "identity" {
  source        = "./modules/identity"
  project       = var.project
  for_each      = local.identities
  run           = var.run
  name          = each.key
  site          = each.value.site
  warm_start    = each.value.warm_start
  data          = var.data
  bucket        = module.objects.name
  configuration = module.configuration.name
  deleter_role  = local.deleter_role
}

module "learner" {
  source       = "./modules/learner"
  project      = var.project
  for_each     = local.learners
  run          = var.run
  name         = each.key
  zones        = each.value.zones
  kind         = each.value.kind
  chips        = each.value.chips
  topology     = each.value.topology
  machine_type = each.value.machine_type
  spot         = each.value.spot
  reservation  = each.value.reservation

  flex_start_hours = each.value.flex_start_hours
  image            = each.value.image
  disk_gib         = each.value.disk_gib
  identity         = module.identity[coalesce(each.value.site, each.key)].account
  auth_folder      = var.auth_folder
  network          = module.network.id
  subnetwork       = module.network.subnetworks[regex("^(.*)-(?:ai[0-9])?[a-z]$", each.value.zone)[0]]
  tag              = local.tags.learner
  livez_port       = local.livez_port
  supervisor_port  = local.supervisor_port
  names_role       = local.several ? "projects/${var.project}/roles/${google_project_iam_custom_role.names[0].role_id}" : null
  paused           = var.paused || each.value.paused
  startup_script   = local.startup_script
  data             = var.data
  cache            = try("http://${local.caches[regex("^(.*)-(?:ai[0-9])?[a-z]$", each.value.zone)[0]].address}:${local.cache_port}", null)
  boot             = local.boot[each.value.kind == "cpu" ? "cpu" : "tpu"]
  files            = local.files
  labels           = local.labels
}

# Mends what Google does not, lets go what has ended, stops what is spent, and watches the run.
module "keeper" {
  source  = "./modules/keeper"
  count   = var.keeper ? 1 : 0
  project = var.project
  run     = var.run
  zone    = var.nats.zones[0]
  image   = local.images.cpu
  groups = flatten([for name, learner in module.learner : [for group in learner.groups : {
    project = var.project
    zone    = group.zone
    name    = group.name
    hosts   = group.target_size
    ours    = learner.bulk

    dollars_hour = try(var.budget.learners[name], 0)
  }]])
  stop_at = var.stop_at
  budget = var.budget == null ? null : {
    dollars      = var.budget.dollars
    dollars_hour = try(coalesce(var.budget.dollars_hour), 0)
    uncounted    = try(coalesce(var.budget.uncounted), [])
  }
  bucket         = module.objects.name
  auth_folder    = var.auth_folder
  webhook_file   = var.webhook_file
  boot           = local.boot["cpu"]
  files          = local.files
  subnetwork     = module.network.subnetworks[local.nats_regions[0]]
  tag            = local.tags.keeper
  startup_script = local.startup_script
  labels         = local.labels

  depends_on = [google_project_service.this]
}

# What learners of one region read of versions crosses regions once.
module "cache" {
  source         = "./modules/cache"
  for_each       = local.caches
  project        = var.project
  run            = var.run
  region         = each.key
  zone           = each.value.zone
  address        = each.value.address
  port           = local.cache_port
  image          = local.images.cpu
  disk_gib       = 100
  bucket         = module.objects.name
  configuration  = module.configuration.name
  subnetwork     = module.network.subnetworks[each.key]
  tag            = local.tags.cache
  startup_script = local.startup_script
  labels         = local.labels
}

# An error that a unit of any machine of the run has logged, told at most every five minutes.
resource "google_monitoring_alert_policy" "errors" {
  count                 = length(var.notification_channels) > 0 ? 1 : 0
  display_name          = "${local.name}: an error in the log"
  combiner              = "OR"
  notification_channels = var.notification_channels
  user_labels           = local.labels

  conditions {
    display_name = "a unit has logged an error"
    condition_matched_log {
      filter = "logName=\"projects/${var.project}/logs/diloco\" AND severity>=ERROR AND labels.machine=~\"^${local.name}-\""
    }
  }

  alert_strategy {
    auto_close = "1800s"
    notification_rate_limit {
      period = "300s"
    }
  }

  depends_on = [google_project_service.this]
}

# A second line beside the keeper's count: it sees every dollar of the project, hours later, and stops
# nothing. Its API refuses a person's credentials without a project that its requests are counted in.
resource "google_billing_budget" "this" {
  count           = var.billing_account == null ? 0 : 1
  provider        = google.billing
  billing_account = var.billing_account
  display_name    = local.name

  budget_filter {
    projects        = ["projects/${var.project}"]
    calendar_period = "MONTH"
  }

  amount {
    specified_amount {
      currency_code = "USD"
      units         = tostring(ceil(var.budget.dollars))
    }
  }

  dynamic "threshold_rules" {
    for_each = [0.5, 0.9, 1]
    content {
      threshold_percent = threshold_rules.value
    }
  }

  dynamic "all_updates_rule" {
    for_each = length(var.notification_channels) > 0 ? [var.notification_channels] : []
    content {
      monitoring_notification_channels = all_updates_rule.value
    }
  }

  depends_on = [google_project_service.this]
}

# Operators: the run's objects, and the machines by IAP. Their credentials for NATS stay with them.
resource "google_storage_bucket_iam_member" "operator" {
  for_each = var.operators
  bucket   = module.objects.name
  role     = "roles/storage.objectUser"
  member   = each.key
}

resource "google_project_iam_member" "operator_tunnel" {
  for_each = var.operators
  project  = var.project
  role     = "roles/iap.tunnelResourceAccessor"
  member   = each.key

  condition {
    title      = "ssh only"
    expression = "destination.port == 22"
  }
}

resource "google_project_iam_member" "operator_login" {
  for_each = var.operators
  project  = var.project
  role     = "roles/compute.osAdminLogin"
  member   = each.key

  # Root on this run's machines, and on no other of the project.
  condition {
    title      = "machines of the run"
    expression = "resource.name.extract('/instances/{name}').startsWith('${local.name}-')"
  }
}

# Who logs in to a machine could act as its service account, and must be allowed to.
resource "google_service_account_iam_member" "operator" {
  for_each = {
    for pair in setproduct(var.operators, local.machines) : "${pair[0]} ${pair[1]}" => {
      member = pair[0]
      id     = local.accounts[pair[1]]
    }
  }
  service_account_id = each.value.id
  role               = "roles/iam.serviceAccountUser"
  member             = each.value.member
}
