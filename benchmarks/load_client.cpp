// Streaming completions for many users at once, at little processor time of its own.
//
//   load_client PORT USERS SECONDS BODIES
//
// BODIES has a JSON request on each line. Every user posts one to /v1/completions of this machine,
// reads the stream to its end and takes the next line, until SECONDS are over; what is in progress
// then is read to its end. With SECONDS 0 each line is posted once. Standard output gets one line
// of JSON for each request, times in seconds since the start, and a last one with the processor
// time that this program took. Connections are opened before the start and kept alive.

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr int kMaxEvents = 256;

double now_s() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

int open_connection(int port) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) {
    fail("connect");
  }
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return fd;
}

// The text after `key`, up to the quote that ends it, escapes as they are.
std::string_view string_after(std::string_view json, std::string_view key) {
  size_t start = json.find(key);
  if (start == json.npos) return {};
  start += key.size();
  size_t end = start;
  while (end < json.size() && json[end] != '"') end += json[end] == '\\' ? 2 : 1;
  return json.substr(start, end - start);
}

// A request and what came back.
struct Exchange {
  size_t body = 0;
  double start_s = 0, first_s = 0, last_s = 0, longest_gap_s = 0;
  long events = 0, events_in_time = 0, tokens = 0;
  bool is_done = false;
  std::string finish, text, error;
};

// Takes the bytes of one answer: head, chunks, events.
class Answer {
 public:
  Exchange exchange;
  bool is_complete = false, closes = false;

  void take(const char* data, size_t size, double time_s, double until_s) {
    buffer_.append(data, size);
    if (!has_head_ && !take_head()) return;
    while (!is_complete && take_chunk(time_s, until_s)) {
    }
  }

 private:
  bool take_head() {
    size_t end = buffer_.find("\r\n\r\n");
    if (end == buffer_.npos) return false;
    std::string head = buffer_.substr(0, end);
    buffer_.erase(0, end + 4);
    has_head_ = true;
    is_ok_ = head.compare(0, 12, "HTTP/1.1 200") == 0;
    if (!is_ok_) exchange.error = head.substr(9, head.find('\r') - 9);
    closes = strcasestr(head.c_str(), "\r\nconnection: close") != nullptr;
    const char* length = strcasestr(head.c_str(), "\r\ncontent-length:");
    left_ = length == nullptr ? -1 : std::atol(length + 17);
    return true;
  }

  // One chunk, or what there is of a body of known length; false if more is needed for it.
  bool take_chunk(double time_s, double until_s) {
    if (left_ >= 0) {  // no stream: an error, whose body says why
      exchange.error += " " + buffer_;
      left_ -= static_cast<long>(buffer_.size());
      buffer_.clear();
      is_complete = left_ <= 0;
      return false;
    }
    size_t line = buffer_.find("\r\n");
    if (line == buffer_.npos) return false;
    size_t size = std::strtoul(buffer_.c_str(), nullptr, 16);
    if (buffer_.size() < line + 4 + size) return false;
    take_events(std::string_view(buffer_).substr(line + 2, size), time_s, until_s);
    buffer_.erase(0, line + 4 + size);
    is_complete = size == 0;
    return !is_complete;
  }

  void take_events(std::string_view data, double time_s, double until_s) {
    events_.append(data);
    size_t start = 0;
    for (size_t end; (end = events_.find('\n', start)) != events_.npos; start = end + 1) {
      std::string_view line = std::string_view(events_).substr(start, end - start);
      if (line.substr(0, 6) == "data: ") take_event(line.substr(6), time_s, until_s);
    }
    events_.erase(0, start);
  }

  void take_event(std::string_view event, double time_s, double until_s) {
    if (event.substr(0, 6) == "[DONE]") {
      exchange.is_done = true;
      return;
    }
    if (event.substr(0, 9) == "{\"error\":") exchange.error = "in the stream";
    size_t usage = event.find("\"completion_tokens\":");
    if (usage != event.npos) exchange.tokens = std::atol(event.data() + usage + 20);
    std::string_view finish = string_after(event, "\"finish_reason\":\"");
    if (!finish.empty()) exchange.finish = finish;
    std::string_view text = string_after(event, "\"text\":\"");
    if (text.empty()) return;
    exchange.text += text;
    ++exchange.events;
    exchange.events_in_time += time_s <= until_s;
    if (exchange.first_s == 0) {
      exchange.first_s = time_s;
    } else if (time_s - exchange.last_s > exchange.longest_gap_s) {
      exchange.longest_gap_s = time_s - exchange.last_s;
    }
    exchange.last_s = time_s;
  }

  std::string buffer_, events_;
  bool has_head_ = false, is_ok_ = false;
  long left_ = -1;
};

class Load {
 public:
  Load(int port, int users, double seconds, std::vector<std::string> bodies)
      : port_(port), seconds_(seconds), bodies_(std::move(bodies)), users_(users) {}

  void run() {
    epoll_ = epoll_create1(0);
    for (User& user : users_) connect(user);
    start_s_ = now_s();
    for (User& user : users_) begin(user);
    epoll_event events[kMaxEvents];
    while (running_ > 0) {
      int count = epoll_wait(epoll_, events, kMaxEvents, 1000);
      for (int i = 0; i < count; ++i) read(*static_cast<User*>(events[i].data.ptr));
    }
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    auto seconds = [](const timeval& time) { return time.tv_sec + time.tv_usec * 1e-6; };
    std::printf("{\"cpu_s\":%.6f,\"wall_s\":%.6f}\n",
                seconds(usage.ru_utime) + seconds(usage.ru_stime), now_s() - start_s_);
  }

 private:
  struct User {
    int fd = -1;
    bool is_fresh = true;
    Answer answer;
  };

  void connect(User& user) {
    user.fd = open_connection(port_);
    user.is_fresh = true;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &user;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, user.fd, &event);
  }

  void begin(User& user) {
    bool is_over = seconds_ > 0 ? elapsed() >= seconds_ : next_ == bodies_.size();
    if (is_over) {
      close(user.fd);
      return;
    }
    ++running_;
    user.answer = Answer();
    user.answer.exchange.body = next_++ % bodies_.size();
    user.answer.exchange.start_s = elapsed();
    post(user);
  }

  void post(User& user) {
    const std::string& body = bodies_[user.answer.exchange.body];
    std::string request =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: " +
        std::to_string(body.size()) + "\r\n\r\n" + body;
    if (send(user.fd, request.data(), request.size(), MSG_NOSIGNAL) < 0) reopen(user);
  }

  // A connection that was kept alive may close just when it is used again.
  void reopen(User& user) {
    close(user.fd);
    connect(user);
    post(user);
  }

  void read(User& user) {
    char data[65536];
    ssize_t size = recv(user.fd, data, sizeof data, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    Answer& answer = user.answer;
    if (size <= 0) {
      if (!user.is_fresh && answer.exchange.events == 0) return reopen(user);
      answer.exchange.error = "the connection closed early";
      answer.is_complete = answer.closes = true;
    } else {
      user.is_fresh = false;
      answer.take(data, static_cast<size_t>(size), elapsed(), seconds_ > 0 ? seconds_ : 1e300);
    }
    if (!answer.is_complete) return;
    report(answer.exchange);
    --running_;
    if (answer.closes) {
      close(user.fd);
      connect(user);
    }
    begin(user);
  }

  void report(const Exchange& e) const {
    std::string error = e.error.substr(0, 300);
    for (char& c : error) {
      if (c < ' ' || c == '"' || c == '\\') c = '\'';
    }
    std::printf(
        "{\"body\":%zu,\"start_s\":%.6f,\"first_s\":%.6f,\"last_s\":%.6f,\"end_s\":%.6f,"
        "\"longest_gap_s\":%.6f,\"events\":%ld,\"events_in_time\":%ld,\"tokens\":%ld,"
        "\"is_done\":%s,\"finish\":\"%s\",\"text\":\"%s\",\"error\":\"%s\"}\n",
        e.body, e.start_s, e.first_s, e.last_s, elapsed(), e.longest_gap_s, e.events,
        e.events_in_time, e.tokens, e.is_done ? "true" : "false", e.finish.c_str(), e.text.c_str(),
        error.c_str());
  }

  double elapsed() const { return now_s() - start_s_; }

  int port_, epoll_ = -1, running_ = 0;
  double seconds_, start_s_ = 0;
  std::vector<std::string> bodies_;
  size_t next_ = 0;
  std::vector<User> users_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: load_client PORT USERS SECONDS BODIES\n");
    return 2;
  }
  std::vector<std::string> bodies;
  std::ifstream file(argv[4]);
  for (std::string line; std::getline(file, line);) bodies.push_back(line);
  if (bodies.empty()) fail(argv[4]);
  Load(std::atoi(argv[1]), std::atoi(argv[2]), std::atof(argv[3]), std::move(bodies)).run();
  return 0;
}
