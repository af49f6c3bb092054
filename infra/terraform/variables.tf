variable "project" {
  description = "Google Cloud project in which everything is made."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "project must be a project id: 6 to 30 lower-case letters, digits and hyphens, a letter first."
  }
}

variable "run" {
  description = "Name of the run, as [run] name in the run's TOML file has it."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$", var.run))
    error_message = "run must have up to 40 lower-case letters, digits and hyphens, a letter or digit first and last."
  }

  validation {
    condition     = length("${var.project}-${var.run}") <= 49
    error_message = "project and run together must have at most 48 characters: the names of the buckets are made of both."
  }
}

variable "run_toml" {
  description = "Path of the run's TOML file, without the sections [bus], [store] and [metrics], which are written here."
  type        = string

  validation {
    condition     = fileexists(var.run_toml)
    error_message = "run_toml must be the path of the run's TOML file; docs/configuration.md says what stands in it."
  }

  validation {
    condition     = try(can(regex("(?m)^name *= *\"${var.run}\" *(#.*)?$", file(var.run_toml))), false)
    error_message = "The file run_toml must hold the line: name = \"...\", with the same name as the variable run."
  }

  validation {
    condition     = try(!can(regex("(?m)^ *\\[(bus|store|metrics)\\]", file(var.run_toml))), false)
    error_message = "The file run_toml must not have the sections [bus], [store] or [metrics]: Terraform writes them."
  }
}

variable "releases" {
  description = "Paths of the releases that machines run: cpu for NATS servers, aggregators and machines without accelerators, tpu for the others. make release KIND=cpu, make release KIND=tpu"
  type        = any # An object type would drop a key that it does not know.

  validation {
    condition     = try(length(setsubtract(keys(var.releases), ["cpu", "tpu"])) == 0 && contains(keys(var.releases), "cpu"), false)
    error_message = "releases takes cpu, which NATS servers and aggregators need, and tpu."
  }

  validation {
    condition     = try(alltrue([for path in values(var.releases) : endswith(path, ".tar.gz") && fileexists(path)]), false)
    error_message = "Each of releases must be the path of a .tar.gz; make it with: make release KIND=cpu, make release KIND=tpu"
  }

  validation {
    condition     = try(contains(keys(var.releases), "tpu"), false) || alltrue([for one in values(var.learners) : try(one.kind, "") == "cpu"])
    error_message = "A learner has TPUs, and releases has no tpu; make it with: make release KIND=tpu"
  }
}

variable "auth_folder" {
  description = "Path of the folder that diloco auth has made for this run. Its secrets go to Secret Manager, and neither to the plan nor to the state."
  type        = string

  validation {
    condition     = fileexists("${var.auth_folder}/accounts.conf")
    error_message = "auth_folder must be a folder of diloco auth; docs/provision.md has the commands that make it."
  }

  validation {
    condition = alltrue(flatten([
      for number in [1, 2, 3] : [
        for address in local.nats_addresses : strcontains(try(file("${var.auth_folder}/nats-${number}.conf"), ""), "\"tls://${address}:6222\"")
      ]
    ]))
    error_message = "The servers in auth_folder have other addresses than here. Make it with: diloco auth init FOLDER --run ${var.run} --host ${join(" --host ", local.nats_addresses)} --installed-at /etc/nats --streams-at /var/lib/nats/jetstream"
  }

  validation {
    condition = alltrue([
      for number in [1, 2, 3] :
      strcontains(try(file("${var.auth_folder}/nats-${number}.conf"), ""), "\"/etc/nats/tls/")
      && strcontains(try(file("${var.auth_folder}/nats-${number}.conf"), ""), "store_dir: \"/var/lib/nats/jetstream/")
    ])
    error_message = "The servers in auth_folder must look for their files in /etc/nats, and have their streams in /var/lib/nats/jetstream. Make it with: diloco auth init ... --installed-at /etc/nats --streams-at /var/lib/nats/jetstream"
  }

  validation {
    condition     = alltrue([for number in [1, 2, 3] : strcontains(try(file("${var.auth_folder}/nats-${number}.conf"), ""), "sync_interval: always")])
    error_message = "The servers in auth_folder must have sync_interval: always, or a power cut loses acknowledged messages."
  }

  validation {
    condition = alltrue([
      for number in [1, 2, 3] :
      try(tonumber(regex("max_file_store: ([0-9]+)", try(file("${var.auth_folder}/nats-${number}.conf"), ""))[0]), 0) <= try(var.nats.disk_gib, 50) * pow(2, 30) * 0.9
    ])
    error_message = "The streams in auth_folder (max_file_store) take more than nine tenths of nats.disk_gib. Give more here, or less there: diloco auth init --max-file-gib"
  }
}

variable "subnets" {
  description = "Address range of each region, by region. Every zone below needs its region here. A range that stands here once does not change when regions are added."
  type        = map(string)

  validation {
    condition     = alltrue([for region in keys(var.subnets) : can(regex("^[a-z]+-[a-z]+[0-9]+$", region))])
    error_message = "The keys of subnets must be regions, such as us-central1."
  }

  validation {
    condition = alltrue([
      for range in values(var.subnets) :
      can(cidrhost(range, 20)) && can(regex("^(10\\.|192\\.168\\.|172\\.(1[6-9]|2[0-9]|3[01])\\.)", range))
    ])
    error_message = "The values of subnets must be private ranges of at least 32 addresses, such as 10.64.0.0/20."
  }
}

variable "bucket_location" {
  description = "Where the run's objects are: a region, or US, EU or ASIA. By default the region of the first aggregator, by name, which is cheapest; docs/provision.md says when not."
  type        = string
  default     = null

  validation {
    condition     = var.bucket_location == null || can(regex("^([A-Z]{2,4}[0-9]?|[a-z]+-[a-z]+[0-9]+|[A-Z]+-[A-Z]+[0-9]+)$", coalesce(var.bucket_location, "-")))
    error_message = "bucket_location must be a region, such as us-central1, or US, EU or ASIA."
  }
}

variable "bucket_backstop_days" {
  description = "Age at which the bucket itself deletes what garbage collection should have: shards of updates, and learners' checkpoints."
  type        = any # An object type would drop a key that it does not know.
  default     = {}

  validation {
    condition     = try(length(setsubtract(keys(var.bucket_backstop_days), ["updates", "checkpoints"])) == 0, false)
    error_message = "bucket_backstop_days has an unknown key; it takes updates and checkpoints."
  }

  validation {
    condition     = try(var.bucket_backstop_days.updates, 30) >= 7 && try(var.bucket_backstop_days.checkpoints, 90) >= 7
    error_message = "bucket_backstop_days must be at least 7: younger objects may still be needed by a run that was paused."
  }
}

variable "nats" {
  description = "The three NATS servers: zones, one each; machine type; disk of the streams; days for which snapshots of it are kept."
  type        = any # An object type would drop a key that it does not know.

  validation {
    condition     = try(length(setsubtract(keys(var.nats), ["zones", "machine_type", "disk_gib", "snapshot_days"])) == 0, false)
    error_message = "nats has an unknown key; it takes zones, machine_type, disk_gib and snapshot_days."
  }

  validation {
    condition     = try(length(var.nats.zones) == 3 && length(distinct(var.nats.zones)) == 3, false)
    error_message = "nats.zones must be three different zones: with fewer the loss of one stops the run."
  }

  validation {
    condition = alltrue([
      for zone in try(var.nats.zones, []) : can(var.subnets[regex("^([a-z]+-[a-z]+[0-9]+)-(?:ai[0-9])?[a-z]$", zone)[0]])
    ])
    error_message = "Each zone of nats.zones must be a zone, such as us-central1-a, whose region has a range in subnets."
  }

  validation {
    condition     = try(var.nats.disk_gib, 50) >= 20
    error_message = "nats.disk_gib must be at least 20: the streams take up to the --max-file-gib of diloco auth init, 10 by default."
  }
}

variable "aggregators" {
  description = "The aggregators by name. Two in two zones: one owns the fragments of the other as soon as that one is lost."
  type        = any # An object type would drop a key that it does not know.

  validation {
    condition = try(alltrue([
      for one in values(var.aggregators) :
      length(setsubtract(keys(one), ["zone", "machine_type", "disk_gib"])) == 0 && try(tonumber(one.disk_gib), 50) >= 20
    ]), false)
    error_message = "An aggregator has an unknown key, or a disk below 20 GiB; it takes zone, machine_type and disk_gib."
  }

  validation {
    condition     = length(var.aggregators) >= 1
    error_message = "aggregators must name at least one; two in two zones survive the loss of one."
  }

  validation {
    condition     = alltrue([for name in keys(var.aggregators) : can(regex("^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$", name)) && length("${var.run}${name}") <= 45 && !contains(["operator", "guard", "keeper", "watch"], name)])
    error_message = "Names of aggregators must have lower-case letters, digits and hyphens, none at an end; with the run's name at most 45 characters; and not be operator, guard, keeper or watch."
  }

  validation {
    condition = alltrue([
      for one in values(var.aggregators) : can(var.subnets[regex("^([a-z]+-[a-z]+[0-9]+)-(?:ai[0-9])?[a-z]$", one.zone)[0]])
    ])
    error_message = "The zone of each aggregator must be a zone, such as us-central1-a, whose region has a range in subnets."
  }

  validation {
    condition     = alltrue([for name in keys(var.aggregators) : fileexists("${var.auth_folder}/credentials/${name}.toml")])
    error_message = "An aggregator has no credentials in auth_folder; make them with: diloco auth add-aggregator FOLDER NAME"
  }
}

variable "hourly_checkpoints" {
  description = "Whether the first aggregator's machine makes a checkpoint of the run each hour. It needs the operator's credentials for that, and who takes that machine over has them too."
  type        = bool
  default     = false
}

variable "learners" {
  description = <<-EOT
    The learners by name. kind and size: "v5p" with chips 1, 2 or 4; "v6e" with 1, 4 or 8; "tpu7x" with 4;
    or topology in place of chips for a slice of several hosts, which come all at once, such as "4x4" (v6e) or "2x2x4" (v5p, tpu7x);
    "cpu" with machine_type. Kinds may be mixed. image and disk_gib have defaults by kind.
    slices = 4 makes it a learner of four such slices, each healed by itself, which goes on with those that are left;
    zones names a zone for each of them, of the region of zone, where they are not all in zone.
    spot, reservation or flex_start_hours say how its machines come; else they are on demand.
    warm_start = true lets it read the checkpoints of all learners, which learner.warm_start needs.
    paused = true takes its machines away, and leaves all else: for a pause, or when the run has ended.
    site = "berlin" has it share an account with the other learners of that site: its name begins "berlin-".
  EOT
  type        = any # An object type would drop a key that it does not know: spott = true, at the price on demand.

  validation {
    condition = try(alltrue([
      for one in values(var.learners) : length(setsubtract(keys(one), [
        "zone", "zones", "slices", "kind", "chips", "topology", "machine_type", "spot", "reservation", "flex_start_hours", "image", "disk_gib", "warm_start", "paused", "site",
      ])) == 0
    ]), false)
    error_message = "A learner has an unknown key; it takes zone, zones, slices, kind, chips, topology, machine_type, spot, reservation, flex_start_hours, image, disk_gib, warm_start, paused and site."
  }

  validation {
    condition = alltrue([
      for one in values(var.learners) : alltrue([
        for key in ["spot", "warm_start", "paused"] : can(tobool(lookup(one, key, false)))
      ]) && try(tonumber(one.disk_gib), 100) >= 20
    ])
    error_message = "spot, warm_start and paused of a learner must be true or false, and disk_gib at least 20."
  }

  validation {
    condition     = alltrue([for name in keys(var.learners) : can(regex("^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$", name)) && length("${var.run}${name}") <= 45 && !contains(["operator", "guard", "keeper", "watch"], name)])
    error_message = "Names of learners must have lower-case letters, digits and hyphens, none at an end; with the run's name at most 45 characters; and not be operator, guard, keeper or watch."
  }

  validation {
    condition = alltrue([
      for one in values(var.learners) : can(var.subnets[regex("^([a-z]+-[a-z]+[0-9]+)-(?:ai[0-9])?[a-z]$", one.zone)[0]])
    ])
    error_message = "The zone of each learner must be a zone, such as us-central1-a, whose region has a range in subnets."
  }

  validation {
    condition = alltrue([
      for one in values(var.learners) : try(one.slices, null) == null ? true : try(one.slices >= 1 && one.slices <= 64 && floor(one.slices) == one.slices, false)
    ])
    error_message = "slices of a learner must be a whole number from 1 to 64: all have the one kind, and chips or topology, of the learner."
  }

  validation {
    condition = alltrue([
      for one in values(var.learners) : try(one.zones, null) == null ? true : try(
        length(one.zones) == try(coalesce(one.slices), 1)
        && length(distinct([for zone in concat([one.zone], tolist(one.zones)) : regex("^([a-z]+-[a-z]+[0-9]+)-(?:ai[0-9])?[a-z]$", zone)[0]])) == 1
      , false)
    ])
    error_message = "zones of a learner must be a zone for each of its slices, all of the region of its zone: slices of different regions are different learners."
  }

  validation {
    condition = length(setintersection(keys(var.learners), flatten([
      for name, one in var.learners : [for slice in range(try(one.slices >= 2 ? one.slices : 0, 0)) : "${name}-s${slice}"]
    ]))) == 0
    error_message = "A learner is named like a slice of another one (NAME-s0 and so on): their machines would have the same names. Rename it."
  }

  validation {
    condition     = alltrue([for one in values(var.learners) : contains(["v5p", "v6e", "tpu7x", "cpu"], try(one.kind, ""))])
    error_message = "The kind of each learner must be v5p, v6e, tpu7x or cpu."
  }

  validation {
    condition = alltrue([
      for one in values(var.learners) : try(one.kind, "") == "cpu"
      ? try(one.machine_type, null) != null && try(one.chips, null) == null && try(one.topology, null) == null
      : try(one.machine_type, null) == null && (try(one.chips, null) == null) != (try(one.topology, null) == null)
    ])
    error_message = "A learner of kind cpu takes machine_type; one of another kind takes either chips or topology, and no machine_type."
  }

  validation {
    condition = alltrue([
      for one in values(var.learners) : try(one.chips, null) == null || try(tonumber(one.chips) >= 1 && tonumber(one.chips) <= 8, false)
    ])
    error_message = "chips must be what one host has, 1 to 8. Larger slices take topology."
  }

  validation {
    condition = alltrue([
      for one in values(var.learners) : try(one.topology, null) == null || can(regex("^[0-9]+(x[0-9]+){1,2}$", try(coalesce(one.topology), "-")))
    ])
    error_message = "topology must be that of a slice, such as 4x4 or 4x4x4."
  }

  validation {
    condition = alltrue([
      for one in values(var.learners) :
      length(compact([try(tobool(one.spot), false) ? "spot" : null, try(one.reservation, null), try(one.flex_start_hours, null)])) <= 1
      && try(one.flex_start_hours >= 1 && one.flex_start_hours <= 168, try(one.flex_start_hours, null) == null)
    ])
    error_message = "A learner is one of spot, of a reservation, and flex-start of 1 to 168 flex_start_hours."
  }

  validation {
    condition     = alltrue([for name in keys(var.learners) : fileexists("${var.auth_folder}/credentials/${name}.toml")])
    error_message = "A learner has no credentials in auth_folder; make them with: diloco auth add-learner FOLDER NAME"
  }

  validation {
    condition = alltrue([
      for name, one in var.learners : try(one.site, null) == null || (
        can(regex("^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$", try(coalesce(one.site), "-"))) && startswith(name, "${try(coalesce(one.site), "-")}-")
      )
    ])
    error_message = "A learner of a site must be named after it: site = \"berlin\" has learners \"berlin-1\", \"berlin-2\" and so on."
  }

  validation {
    condition = alltrue(flatten([
      for site in distinct(compact([for one in values(var.learners) : try(one.site, null)])) : [
        for name, one in var.learners : (try(one.site, null) == site) || (!startswith(name, "${site}-") && name != site)
      ]
    ]))
    error_message = "A learner that is not of a site is named like one of it: the site's account could write its objects."
  }

  validation {
    condition     = length(distinct([for name, one in var.learners : try(coalesce(one.site), name)])) <= 30
    error_message = "More than 30 learners without a site, and sites: give learners a site, whose account they share. docs/security.md says what they may then do to each other."
  }

  validation {
    condition     = length(setintersection(keys(var.learners), keys(var.aggregators))) == 0
    error_message = "A learner and an aggregator must not have the same name: their credentials would be the same file."
  }
}

variable "data" {
  description = "Prepared data (diloco data prepare) in a bucket with uniform access, gs://BUCKET/FOLDER: learners may read it, and have it in /var/lib/diloco-data/tokens before they start."
  type        = string
  default     = null

  validation {
    condition     = var.data == null || can(regex("^gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/[A-Za-z0-9._-]+)+$", coalesce(var.data, "-")))
    error_message = "data must be a folder of prepared data in a bucket, such as gs://my-data/tokens."
  }
}

variable "caches" {
  description = "Zones of caches, at most one of a region: learners of its region read versions through it, which then cross regions once. It pays where a region far from the bucket has several learners."
  type        = set(string)
  default     = []

  validation {
    condition = alltrue([
      for zone in var.caches : can(var.subnets[regex("^([a-z]+-[a-z]+[0-9]+)-(?:ai[0-9])?[a-z]$", zone)[0]])
    ]) && length(distinct([for zone in var.caches : try(regex("^(.*)-(?:ai[0-9])?[a-z]$", zone)[0], zone)])) == length(var.caches)
    error_message = "caches must be zones, such as us-east5-a, of different regions that have a range in subnets."
  }
}

variable "paused" {
  description = "Whether no learner has machines for now: for a pause, or when the run has ended. NATS, aggregators, the bucket and all rights stay."
  type        = bool
  default     = false
}

variable "keeper" {
  description = "Whether a small machine makes preempted spot slices of several hosts anew, which Google does not, takes the machines of learners whose run has ended, and watches the run (diloco watch)."
  type        = bool
  default     = true

  validation {
    condition     = !var.keeper || fileexists("${var.auth_folder}/credentials/watch.toml")
    error_message = "The watch on the keeper's machine has no credentials in auth_folder; make them with: diloco auth add-reader FOLDER watch"
  }
}

variable "stop_at" {
  description = "Time after which the keeper takes all machines of learners, until it is later: what a day costs, and the days until then, bound what is spent."
  type        = string
  default     = ""

  validation {
    condition     = var.stop_at == "" || (can(regex("^[0-9-]{10}T[0-9:]{8}Z$", var.stop_at)) && can(timeadd(var.stop_at, "0s")))
    error_message = "stop_at must be a time in UTC, such as 2026-12-24T00:00:00Z."
  }

  validation {
    condition     = var.stop_at == "" || var.keeper
    error_message = "stop_at needs the keeper, which takes the machines: keeper = true."
  }
}

variable "budget" {
  description = <<-EOT
    dollars for the whole run: once they are spent, the keeper takes all machines of learners, until there are more.
    It counts what runs, by dollars_hour of one machine of each of learners, and dollars_hour of all else;
    uncounted names what has no price. diloco host provision writes these from its prices.
  EOT
  type        = any # An object type would drop a key that it does not know.
  default     = null

  validation {
    condition = var.budget == null || try(
      length(setsubtract(keys(var.budget), ["dollars", "dollars_hour", "learners", "uncounted"])) == 0
      && var.budget.dollars > 0 && try(var.budget.dollars_hour, 0) >= 0
      && length(setsubtract(keys(try(var.budget.learners, {})), keys(var.learners))) == 0
    , false)
    error_message = "budget takes dollars, more than 0, with dollars_hour, learners (prices by the names of learners) and uncounted."
  }

  validation {
    condition     = var.budget == null || var.keeper
    error_message = "budget needs the keeper, which takes the machines: keeper = true."
  }
}

variable "billing_account" {
  description = "Billing account in which a budget of Google Cloud's tells people, too, what a month of the project costs; who applies needs billing.budgets.create there."
  type        = string
  default     = null

  validation {
    condition     = var.billing_account == null || can(regex("^[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}$", coalesce(var.billing_account, "-")))
    error_message = "billing_account must be an id such as 012345-6789AB-CDEF01, as gcloud billing accounts list prints it."
  }

  validation {
    condition     = var.billing_account == null || var.budget != null
    error_message = "billing_account needs a budget, whose dollars it is told."
  }
}

variable "webhook_file" {
  description = "Path of a file with the line DILOCO_WEBHOOK_URL=https://..., to which the watch on the keeper's machine posts alerts. It goes to Secret Manager, and neither to the plan nor to the state."
  type        = string
  default     = null

  validation {
    condition     = var.webhook_file == null || try(can(regex("(?m)^DILOCO_WEBHOOK_URL=https?://[^ \"']+$", file(var.webhook_file))), false)
    error_message = "webhook_file must be the path of a file with the line DILOCO_WEBHOOK_URL=https://..., without quotes."
  }

  validation {
    condition     = var.webhook_file == null || var.keeper
    error_message = "webhook_file needs the keeper, on whose machine the watch runs: keeper = true."
  }
}

variable "notification_channels" {
  description = "Channels of Cloud Monitoring that hear of errors in the logs: projects/PROJECT/notificationChannels/NUMBER."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for channel in var.notification_channels : can(regex("^projects/[^/]+/notificationChannels/[0-9]+$", channel))])
    error_message = "notification_channels must be names such as projects/my-project/notificationChannels/123, as gcloud beta monitoring channels list prints them."
  }
}

variable "images" {
  description = "Image of each kind of machine: a family follows Google's updates, a name stays what it is."
  type        = any # An object type would drop a key that it does not know.
  default     = {}

  validation {
    condition     = try(length(setsubtract(keys(var.images), ["v5p", "v6e", "tpu7x", "cpu"])) == 0, false)
    error_message = "images has an unknown key; it takes v5p, v6e, tpu7x and cpu."
  }
}

variable "operators" {
  description = "Who operates the run: IAM members, such as user:ann@example.org. They may reach the machines by IAP with ssh, as root, and have all rights on the run's objects."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for member in var.operators : can(regex("^(user|group|serviceAccount):[^ ]+@[^ ]+$", member))])
    error_message = "operators must be IAM members: user:NAME@DOMAIN, group:NAME@DOMAIN or serviceAccount:NAME@DOMAIN; nobody else than known people."
  }
}

variable "metrics_port" {
  description = "Port of /metrics, /livez and /readyz of aggregators and learners."
  type        = number
  default     = 9464

  validation {
    condition     = var.metrics_port >= 1024 && var.metrics_port <= 65535 && var.metrics_port != 9463
    error_message = "metrics_port must be between 1024 and 65535, and not 9463, where machines answer health checks."
  }

  validation {
    condition     = var.metrics_port != 9466 || alltrue([for one in values(var.learners) : try(coalesce(one.slices), 1) == 1])
    error_message = "metrics_port must not be 9466, where the supervisors of a learner of several slices listen."
  }
}

variable "monitoring_ranges" {
  description = "Private address ranges from which Prometheus may read metrics."
  type        = set(string)
  default     = []

  validation {
    condition = alltrue([
      for range in var.monitoring_ranges :
      can(cidrhost(range, 0)) && can(regex("^(10\\.|192\\.168\\.|172\\.(1[6-9]|2[0-9]|3[01])\\.)", range))
    ])
    error_message = "monitoring_ranges must be private ranges, such as 10.64.0.0/20: /metrics has no password."
  }
}

variable "labels" {
  description = "Labels of everything that takes some."
  type        = map(string)
  default     = {}
}
