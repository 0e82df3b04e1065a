// A fake SGLang for benchmarks: canned /generate answers with log-probs after a drawn latency, and the control routes.
//
//   cc -O2 -o server server.c -lm && ./server BODIES PORT        (port 0: any; the port is printed on one line)
//
// One thread, one epoll, a heap of due times. BODIES holds K.head and K.tail for each answer length K: what stands before
// and behind the request's id, latency and weight version. Latencies depend on the seed, the prompt's first id and how often
// that prompt was asked for, never on the order of arrival, so every client under test gets the same ones.
//
// Beyond SGLang's routes: POST /configure?name=value&..., POST /mark?target=N (begin a window), GET /stats.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FD = 1 << 16, IDS = 1 << 16, BUCKETS = 1 << 15, RID = 64, SMALL = 4096, LATE_SLOTS = 64 };

typedef struct { char *head, *tail; size_t head_n, tail_n; int tokens; } Body;
struct Conn;
typedef struct Request {
  char rid[RID];
  struct Conn *conn;       // NULL: its client has gone
  long long arrived, due;  // microseconds; due < 0: it hangs
  int place;               // in the heap; -1: not there
  int parked;              // arrived while paused
  int aborted;             // ends as such when it is due
  Body *body;
  struct Request *next, **link;          // chain of its rid's bucket
  struct Request *list_next, **list_link;  // all requests
} Request;
typedef struct Conn {
  int fd, wants_out;
  char *in;
  size_t in_n, in_cap;
  struct iovec out[4];
  int out_at, out_count;
  char small[SMALL];
  Request *request;
} Conn;

static Conn *conns[MAX_FD];
static Request *heap_[1 << 18], *buckets[BUCKETS], *all;
static int heap_n, poller, paused, n_bodies;
static long long paused_at;
static Body bodies[32];
static const char *folder;
static unsigned short asked[IDS];
static char version[32] = "default";

// Settings of /configure. Times are milliseconds. hang_*: so many first requests for each of the first prompts hang.
// *_mod, *_rem: the first request for a prompt whose number is rem modulo mod.
static struct {
  double seed, median, sigma, cap, abort_ms, disconnect, hang_below, hang_times, hang_mod, hang_rem, reset_mod, reset_rem, fail_mod, fail_rem;
} settings;
static const struct { const char *name; double *value; } names[] = {
  {"seed", &settings.seed}, {"median", &settings.median}, {"sigma", &settings.sigma}, {"cap", &settings.cap},
  {"abort", &settings.abort_ms}, {"disconnect", &settings.disconnect}, {"hang_below", &settings.hang_below}, {"hang_times", &settings.hang_times},
  {"hang_mod", &settings.hang_mod}, {"hang_rem", &settings.hang_rem}, {"reset_mod", &settings.reset_mod},
  {"reset_rem", &settings.reset_rem}, {"fail_mod", &settings.fail_mod}, {"fail_rem", &settings.fail_rem},
};
// Counts since /configure, and of the window since /mark.
static struct { long generates, finished, aborted, abandoned, resets, failed, accepted, open, running, waiting, aborts, other; } count;
static struct {
  long long begun, changed, idle_at, full_at;
  double cpu, running_us;
  long target, most, late[LATE_SLOTS], answers;
} window_;

static long long now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}
static double cpu_s(void) {
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}
static void change_running(int by) {
  long long now = now_us();
  window_.running_us += (double)(now - window_.changed) * count.running;
  window_.changed = now;
  count.running += by;
  if (count.running > window_.most) window_.most = count.running;
  if (!count.running) window_.idle_at = now;
  if (!window_.full_at && window_.target && count.running >= window_.target) window_.full_at = now;
}
static void mark(long target) {
  long long now = now_us();
  memset(&window_, 0, sizeof window_);
  window_.begun = window_.changed = now;
  window_.cpu = cpu_s();
  window_.target = target;
  window_.most = count.running;
  if (!count.running) window_.idle_at = now;
  if (target && count.running >= target) window_.full_at = now;
}

// --- the heap of due times
static void put(int at, Request *r) { heap_[at] = r; r->place = at; }
static void up(int at, Request *r) {
  while (at && heap_[(at - 1) / 2]->due > r->due) { put(at, heap_[(at - 1) / 2]); at = (at - 1) / 2; }
  put(at, r);
}
static void down(int at, Request *r) {
  for (;;) {
    int child = 2 * at + 1;
    if (child >= heap_n) break;
    if (child + 1 < heap_n && heap_[child + 1]->due < heap_[child]->due) child++;
    if (heap_[child]->due >= r->due) break;
    put(at, heap_[child]);
    at = child;
  }
  put(at, r);
}
static void schedule(Request *r) { if (r->due >= 0) up(heap_n++, r); }
static void unschedule(Request *r) {
  int at = r->place;
  if (at < 0) return;
  r->place = -1;
  Request *last = heap_[--heap_n];
  if (last == r) return;
  if (at && heap_[(at - 1) / 2]->due > last->due) up(at, last); else down(at, last);
}

// --- requests
static Request **bucket_of(const char *rid) {
  unsigned h = 2166136261u;
  for (; *rid; rid++) h = (h ^ (unsigned char)*rid) * 16777619u;
  return &buckets[h % BUCKETS];
}
static void enter(Request *r) {
  Request **bucket = bucket_of(r->rid);
  r->next = *bucket; r->link = bucket;
  if (r->next) r->next->link = &r->next;
  *bucket = r;
  r->list_next = all; r->list_link = &all;
  if (all) all->list_link = &r->list_next;
  all = r;
  if (r->parked) count.waiting++; else change_running(1);
}
static void leave(Request *r) {
  unschedule(r);
  *r->link = r->next;
  if (r->next) r->next->link = r->link;
  *r->list_link = r->list_next;
  if (r->list_next) r->list_next->list_link = r->list_link;
  if (r->parked) count.waiting--; else change_running(-1);
  if (r->conn) r->conn->request = NULL;
  free(r);
}

// --- connections
static void drop(Conn *c) {
  Request *r = c->request;
  if (r) {  // a plain call whose client has gone runs on until that is noticed
    long long noticed = now_us() + (long long)(settings.disconnect * 1000);
    r->conn = NULL;
    count.abandoned++;
    if (r->parked || r->due < 0 || r->due > noticed) { unschedule(r); r->due = noticed; schedule(r); }
  }
  conns[c->fd] = NULL;
  close(c->fd);
  free(c->in);
  free(c);
  count.open--;
}
static void want_out(Conn *c, int out) {
  if (c->wants_out == out) return;
  c->wants_out = out;
  struct epoll_event e = {.events = EPOLLIN | (out ? EPOLLOUT : 0), .data.fd = c->fd};
  epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}
static void flush_out(Conn *c) {
  while (c->out_at < c->out_count) {
    struct msghdr m = {.msg_iov = c->out + c->out_at, .msg_iovlen = (size_t)(c->out_count - c->out_at)};
    ssize_t sent = sendmsg(c->fd, &m, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EAGAIN) want_out(c, 1); else drop(c);
      return;
    }
    while (c->out_at < c->out_count && (size_t)sent >= c->out[c->out_at].iov_len) sent -= (ssize_t)c->out[c->out_at++].iov_len;
    if (c->out_at < c->out_count) {
      c->out[c->out_at].iov_base = (char *)c->out[c->out_at].iov_base + sent;
      c->out[c->out_at].iov_len -= (size_t)sent;
    }
  }
  want_out(c, 0);
}
#define HEAD "HTTP/1.1 %s\r\ndate: Sun, 29 Nov 2026 17:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %zu\r\ncontent-type: application/json\r\n\r\n"
static void say(Conn *c, const char *status, const char *format, ...) {
  char text[SMALL / 2];
  va_list values;
  va_start(values, format);
  int n = vsnprintf(text, sizeof text, format, values);
  va_end(values);
  int h = snprintf(c->small, sizeof c->small, HEAD "%s", status, (size_t)n, text);
  c->out[0] = (struct iovec){c->small, (size_t)h};
  c->out_at = 0; c->out_count = 1;
  flush_out(c);
}
static void answer(Request *r, Body *body, const char *reason) {
  Conn *c = r->conn;
  double took = (double)(now_us() - r->arrived) * 1e-6;
  if (c) {
    char middle[256];
    int m = snprintf(middle, sizeof middle, "%s\",\"e2e_latency\":%.6f,\"weight_version\":\"%s\",\"finish_reason\":%s", r->rid, took, version, reason);
    size_t total = body->head_n + (size_t)m + body->tail_n;
    // The head of the answer and the id share one small buffer, the canned body is sent from where it lies.
    int h = snprintf(c->small, sizeof c->small, HEAD, "200 OK", total);
    memcpy(c->small + h, middle, (size_t)m);
    c->out[0] = (struct iovec){c->small, (size_t)h};
    c->out[1] = (struct iovec){body->head, body->head_n};
    c->out[2] = (struct iovec){c->small + h, (size_t)m};
    c->out[3] = (struct iovec){body->tail, body->tail_n};
    c->out_at = 0; c->out_count = 4;
  }
  leave(r);
  if (c) flush_out(c);
}
static Body *body_of(int tokens);
static void abort_one(Request *r) {
  count.aborted++;
  Body *none = body_of(0);
  answer(r, none, "{\"type\":\"abort\",\"message\":\"Aborted\"}");
}
static void end(Request *r) {
  if (!r->conn) { leave(r); return; }
  if (r->aborted) { abort_one(r); return; }
  count.finished++;
  window_.answers++;
  long late = (long)((now_us() - r->due) / 1000);
  window_.late[late < 0 ? 0 : late < LATE_SLOTS ? late : LATE_SLOTS - 1]++;
  answer(r, r->body, "{\"type\":\"stop\",\"matched\":151645}");
}

// --- what is asked
static char *load(int tokens, const char *kind, size_t *size) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%d.%s", folder, tokens, kind);
  FILE *f = fopen(path, "rb");
  if (!f) return NULL;
  fseek(f, 0, SEEK_END);
  *size = (size_t)ftell(f);
  rewind(f);
  char *data = malloc(*size + 1);
  if (fread(data, 1, *size, f) != *size) exit(1);
  fclose(f);
  return data;
}
static Body *body_of(int tokens) {
  for (int i = 0; i < n_bodies; i++) if (bodies[i].tokens == tokens) return &bodies[i];
  Body b = {.tokens = tokens};
  if (n_bodies == 32 || !(b.head = load(tokens, "head", &b.head_n)) || !(b.tail = load(tokens, "tail", &b.tail_n))) return NULL;
  bodies[n_bodies] = b;
  return &bodies[n_bodies++];
}
static char *field(char *text, const char *name) {  // text behind "name": and spaces
  char *at = strstr(text, name);
  if (!at) return NULL;
  at += strlen(name);
  while (*at == ' ' || *at == ':') at++;
  return at;
}
static uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}
static double latency_us(unsigned id, unsigned times) {
  if (settings.sigma == 0) return settings.median * 1000;
  uint64_t key = mix(mix((uint64_t)settings.seed * 1000003 + id) + times);
  double u = ((double)(key >> 11) + 1) / 9007199254740993.0, v = (double)(mix(key) >> 11) / 9007199254740992.0;
  double ms = settings.median * exp(settings.sigma * sqrt(-2 * log(u)) * cos(2 * M_PI * v));
  return 1000 * (settings.cap > 0 && ms > settings.cap ? settings.cap : ms);
}
static int hit(double mod, double rem, unsigned id) { return mod > 0 && id % (unsigned)mod == (unsigned)rem; }
static void generate(Conn *c, char *text) {
  char *rid = field(text, "\"rid\""), *tokens = field(text, "\"max_new_tokens\""), *ids = field(text, "\"input_ids\"");
  count.generates++;
  if (!rid || *rid != '"' || !tokens || !ids) { say(c, "400 Bad Request", "{\"error\":{\"message\":\"rid, input_ids or max_new_tokens is missing\"}}"); return; }
  unsigned id = (unsigned)atol(ids + 1) % IDS, times = asked[id]++;
  Body *body = body_of(atoi(tokens));
  if (!body) { say(c, "400 Bad Request", "{\"error\":{\"message\":\"no canned answer of that length\"}}"); return; }
  if (!times && hit(settings.reset_mod, settings.reset_rem, id)) {
    struct linger now = {1, 0};
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    count.resets++;
    drop(c);
    return;
  }
  if (!times && hit(settings.fail_mod, settings.fail_rem, id)) { count.failed++; say(c, "500 Internal Server Error", "{\"error\":{\"message\":\"as scripted\"}}"); return; }
  Request *r = calloc(1, sizeof *r);
  for (int i = 0; i < RID - 1 && rid[i + 1] && rid[i + 1] != '"'; i++) r->rid[i] = rid[i + 1];
  int hangs = (times < settings.hang_times && id < settings.hang_below) || (!times && hit(settings.hang_mod, settings.hang_rem, id));
  r->arrived = now_us();
  r->due = hangs ? -1 : r->arrived + (long long)latency_us(id, times);
  r->place = -1;
  r->body = body;
  r->conn = c;
  r->parked = paused;
  c->request = r;
  enter(r);
  if (paused) return;
  if (r->due == r->arrived) end(r); else schedule(r);
}
static void abort_requests(Conn *c, char *text) {
  char *rid = field(text, "\"rid\""), *every = field(text, "\"abort_all\"");
  count.aborts++;
  if (every && !strncmp(every, "true", 4)) {
    while (all) abort_one(all);
  } else if (rid) {
    char *stop = strchr(++rid, '"');
    if (stop) *stop = 0;
    for (Request *r = *bucket_of(rid); r; r = r->next) if (!strcmp(r->rid, rid)) {
      if (settings.abort_ms > 0) { unschedule(r); r->due = now_us() + (long long)(settings.abort_ms * 1000); r->aborted = 1; schedule(r); }
      else abort_one(r);
      break;
    }
  }
  say(c, "200 OK", "");
}
static void resume(void) {
  if (!paused) return;
  long long now = now_us(), stood = now - paused_at;
  paused = 0;
  for (int i = 0; i < heap_n; i++) heap_[i]->due += stood;
  for (Request *r = all, *next; r; r = next) {
    next = r->list_next;
    if (!r->parked) continue;
    r->parked = 0;
    count.waiting--;
    change_running(1);
    if (r->due >= 0) { r->due += now - r->arrived; schedule(r); }
  }
}
static void configure(char *query) {
  memset(&settings, 0, sizeof settings);
  settings.disconnect = 4000;
  memset(asked, 0, sizeof asked);
  strcpy(version, "default");
  resume();
  long open = count.open, running = count.running, waiting = count.waiting;
  memset(&count, 0, sizeof count);
  count.open = open; count.running = running; count.waiting = waiting;
  for (char *item = strtok(query, "&"); item; item = strtok(NULL, "&")) {
    char *value = strchr(item, '=');
    if (!value) continue;
    *value++ = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) if (!strcmp(names[i].name, item)) *names[i].value = atof(value);
  }
  mark(0);
}
static double late_ms(double share) {
  long seen = 0;
  for (int i = 0; i < LATE_SLOTS; i++) if ((seen += window_.late[i]) >= share * (double)window_.answers) return i;
  return LATE_SLOTS;
}
static void stats(Conn *c) {
  change_running(0);
  double wall = (double)(now_us() - window_.begun) * 1e-6;
  say(c, "200 OK",
      "{\"generates\":%ld,\"finished\":%ld,\"aborted\":%ld,\"abandoned\":%ld,\"resets\":%ld,\"failed\":%ld,\"aborts\":%ld,\"accepted\":%ld,"
      "\"connections\":%ld,\"running\":%ld,\"waiting\":%ld,\"wall\":%.6f,\"cpu\":%.6f,\"mean_running\":%.3f,\"most\":%ld,"
      "\"answers\":%ld,\"late_p50_ms\":%.0f,\"late_p99_ms\":%.0f,\"idle_at\":%.6f,\"full_at\":%.6f}",
      count.generates, count.finished, count.aborted, count.abandoned, count.resets, count.failed, count.aborts, count.accepted,
      count.open, count.running, count.waiting, wall, cpu_s() - window_.cpu, wall > 0 ? window_.running_us * 1e-6 / wall : 0.0,
      window_.most, window_.answers, late_ms(0.5), late_ms(0.99), (double)window_.idle_at * 1e-6, (double)window_.full_at * 1e-6);
}
static void pause_all(char *text) {
  char *mode = field(text, "\"mode\"");
  if (mode && !strncmp(mode, "\"abort\"", 7)) while (all) abort_one(all);
  if (!paused) { paused = 1; paused_at = now_us(); }
}
static int is(const char *line, const char *route) { return !strncmp(line, route, strlen(route)); }
static void serve(Conn *c, char *line, char *body) {
  if (is(line, "POST /generate")) { generate(c, body); return; }
  if (is(line, "POST /abort_request")) { abort_requests(c, body); return; }
  count.other++;
  if (is(line, "GET /stats")) { stats(c); return; }
  if (is(line, "POST /mark")) { char *t = strstr(line, "target="); mark(t ? atol(t + 7) : 0); say(c, "200 OK", "{}"); return; }
  if (is(line, "POST /configure?")) { configure(line + 16); say(c, "200 OK", "{}"); return; }
  if (is(line, "POST /weights?version=")) { snprintf(version, sizeof version, "%ld", atol(line + 22)); say(c, "200 OK", "{}"); return; }
  if (is(line, "POST /pause_generation")) { pause_all(body); say(c, "200 OK", "{\"status\":\"ok\"}"); return; }
  if (is(line, "POST /continue_generation")) { resume(); say(c, "200 OK", "{\"status\":\"ok\"}"); return; }
  if (is(line, "POST /flush_cache")) { say(c, "200 OK", "Cache flushed."); return; }
  if (is(line, "GET /ready") || is(line, "GET /health")) { say(c, paused ? "503 Service Unavailable" : "200 OK", "{}"); return; }
  if (is(line, "GET /v1/loads")) { say(c, "200 OK", "{\"loads\":[{\"num_running_reqs\":%ld,\"num_waiting_reqs\":%ld}]}", count.running, count.waiting); return; }
  if (is(line, "GET /model_info") || is(line, "GET /get_model_info")) { say(c, "200 OK", "{\"model_path\":\"fake\",\"is_generation\":true,\"weight_version\":\"%s\"}", version); return; }
  if (is(line, "GET /server_info")) { say(c, "200 OK", "{\"context_length\":262144,\"weight_version\":\"%s\"}", version); return; }
  say(c, "404 Not Found", "{\"detail\":\"Not Found\"}");
}
static void on_input(int fd) {
  Conn *c = conns[fd];
  for (;;) {
    if (c->in_cap - c->in_n < 4096) c->in = realloc(c->in, c->in_cap = c->in_cap * 2 + 8192);
    size_t room = c->in_cap - c->in_n - 1;
    ssize_t got = recv(fd, c->in + c->in_n, room, 0);
    if (!got || (got < 0 && errno != EAGAIN)) { drop(c); return; }
    if (got < 0) break;
    c->in_n += (size_t)got;
    if ((size_t)got < room) break;
  }
  while (c == conns[fd] && c->in_n && !c->request) {
    c->in[c->in_n] = 0;
    char *blank = memmem(c->in, c->in_n, "\r\n\r\n", 4);
    if (!blank) return;
    *blank = 0;
    char *length = strcasestr(c->in, "content-length:");
    size_t body = length ? (size_t)atol(length + 15) : 0, total = (size_t)(blank - c->in) + 4 + body;
    if (c->in_n < total) { *blank = '\r'; return; }
    char *line_end = strstr(c->in, "\r\n"), kept = c->in[total];
    if (line_end) *line_end = 0;
    c->in[total] = 0;
    // The request is eaten before it is served: serving may drop the connection.
    char *text = c->in;
    c->in = malloc(c->in_cap);
    text[total] = kept;
    memcpy(c->in, text + total, c->in_n -= total);
    text[total] = 0;
    serve(c, text, text + (blank - text) + 4);
    free(text);
  }
}
static void on_accept(int listening) {
  int fd, one = 1;
  while ((fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    if (fd >= MAX_FD) { close(fd); continue; }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    Conn *c = calloc(1, sizeof *c);
    c->fd = fd;
    conns[fd] = c;
    count.open++; count.accepted++;
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
  }
}
static int open_listener(int port) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(fd, (void *)&where, sizeof where)) { perror("bind"); exit(1); }
  listen(fd, 8192);
  socklen_t size = sizeof where;
  getsockname(fd, (void *)&where, &size);
  printf("%d\n", ntohs(where.sin_port));
  fflush(stdout);
  return fd;
}
int main(int argc, char **argv) {
  if (argc != 3) { fprintf(stderr, "usage: server BODIES PORT\n"); return 2; }
  signal(SIGPIPE, SIG_IGN);
  folder = argv[1];
  struct rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  configure((char[]){0});
  poller = epoll_create1(0);
  int listening = open_listener(atoi(argv[2]));
  struct epoll_event e = {.events = EPOLLIN, .data.fd = listening};
  epoll_ctl(poller, EPOLL_CTL_ADD, listening, &e);
  static struct epoll_event events[1024];
  for (;;) {
    int wait = -1;
    if (heap_n && !paused) { long long left = heap_[0]->due - now_us(); wait = left <= 0 ? 0 : (int)((left + 999) / 1000); }
    int n = epoll_wait(poller, events, 1024, wait);
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      if (fd == listening) { on_accept(fd); continue; }
      if (conns[fd] && events[i].events & EPOLLOUT) flush_out(conns[fd]);
      if (conns[fd] && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_input(fd);
    }
    long long now = now_us();
    while (heap_n && !paused && heap_[0]->due <= now) {
      Request *r = heap_[0];
      unschedule(r);
      end(r);
    }
  }
}
